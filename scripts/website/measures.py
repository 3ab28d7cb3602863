"""Course machinery. What an open page is asked in its own language: how much it moved, how much of a figure is seen.

JavaScript for Playwright's `evaluate`, shared by the tests and by `scripts.website.measure`.
"""

# The sum of all layout shifts so far, and what moved most. Asked before anything on the page is touched.
SHIFTS = """() => new Promise(done => {
    const seen = [];
    const names = source => source.node?.className?.baseVal ?? source.node?.className ?? source.node?.nodeName ?? "";
    const watch = new PerformanceObserver(list => seen.push(...list.getEntries()));
    watch.observe({type: "layout-shift", buffered: true});
    setTimeout(() => {
        seen.push(...watch.takeRecords());
        watch.disconnect();
        const moved = seen.filter(shift => !shift.hadRecentInput).sort((one, other) => other.value - one.value);
        const total = moved.reduce((sum, shift) => sum + shift.value, 0);
        done([total, moved.length ? moved[0].sources.map(names).filter(Boolean).join(", ") : ""]);
    }, 50);
})"""
MOST_SHIFTED = 0.05

# The share, in percent, of the least visible player. opens: one in the upper half of the first screen is
# judged there; all others are scrolled to below the header. isWidthOnly: only what is cut at the sides counts.
VISIBLE = """async ({opens, isWidthOnly}) => {
    const settled = () => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
    const header = document.querySelector(".md-header")?.offsetHeight ?? 0;
    const shares = [];
    scrollTo(0, 0);
    await settled();
    for (const figure of document.querySelectorAll("figure.kv-figure")) {
        if (!figure.getClientRects().length) continue; // folded
        const isFirst = opens && !shares.length && figure.getBoundingClientRect().top < innerHeight / 2;
        scrollTo(0, isFirst ? 0 : scrollY + figure.getBoundingClientRect().top - header);
        await settled();
        const box = figure.getBoundingClientRect();
        const wide = Math.max(box.width, figure.scrollWidth);
        const across = Math.max(0, Math.min(innerWidth, box.left + wide) - Math.max(0, box.left)) / wide;
        const down = Math.max(0, Math.min(innerHeight, box.bottom) - Math.max(header, box.top)) / box.height;
        shares.push(isWidthOnly ? across : across * Math.min(1, down + 2 / box.height)); // a border may be cut
    }
    return shares.length ? Math.floor(100 * Math.min(1, ...shares) + 1e-6) : null;
}"""

"""Course machinery. What an open page is asked in its own language: how much it moved while it loaded.

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

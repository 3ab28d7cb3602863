"""Course machinery. What tests ask an open page in its own language: how much it moved, which text is faint.

JavaScript for Playwright's `evaluate`.
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
TALLEST = 12_000  # pixels of a page, at a width of 1440

# Axe leaves out the text of drawings. Its colour is compared with what is painted below its middle: the page, then each
# filled shape before it. In both schemes, whichever is shown; in a player, on every frame. Where text and shapes have
# the classes and styles of a pair that was judged, they are not judged again.
FAINT = """least => {
    const numbers = text => (/rgba?\\(([^)]+)\\)/.exec(text)?.[1] ?? "0 0 0 0").split(/[ ,/]+/).map(Number);
    const over = ([r, g, b, alpha = 1], below) => [r, g, b].map((part, i) => part * alpha + below[i] * (1 - alpha));
    const light = colour => colour.map(part => part / 255)
        .map(part => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
        .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
    const contrast = (one, other) => {
        const [high, low] = [light(one), light(other)].sort((a, b) => b - a);
        return (high + 0.05) / (low + 0.05);
    };
    const above = (part, top) => (part === top.parentElement ? [] : [...above(part.parentElement, top), part]);
    const names = (part, top) => above(part, top).map(up => [up.getAttribute("class"), up.getAttribute("fill"),
        up.style.fill, up.style.opacity, up.style.getPropertyValue("--c")]).join("/");
    const sheet = svg => {
        for (let part = svg; part; part = part.parentElement) {
            const colour = numbers(getComputedStyle(part).backgroundColor);
            if (colour[3] !== 0) return colour.slice(0, 3);
        }
        return [255, 255, 255];
    };
    // Paint parts on top of each other; what is inside a group with an opacity fades as one.
    const painted = (parts, svg, below, depth = 0) => {
        for (let i = 0; i < parts.length; i++) {
            const path = above(parts[i], svg), up = path[depth], style = getComputedStyle(up);
            if (up === parts[i]) {
                const [r, g, b, alpha = 1] = numbers(style.fill);
                below = over([r, g, b, alpha * style.fillOpacity * style.opacity], below);
                continue;
            }
            let end = i + 1;
            while (end < parts.length && above(parts[end], svg)[depth] === up) end++;
            const group = painted(parts.slice(i, end), svg, below, depth + 1);
            below = over([...group, Number(style.opacity)], below);
            i = end - 1;
        }
        return below;
    };
    const isUnder = (shape, text, x, y) => {
        const box = shape.box ??= shape.part.getBoundingClientRect();
        if (x < box.left || x > box.right || y < box.top || y > box.bottom) return false;
        if (!(shape.part.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_FOLLOWING)) return false;
        if (shape.part.tagName === "rect") return true;
        const there = new DOMPoint(x, y).matrixTransform(shape.part.getScreenCTM().inverse());
        return shape.part.isPointInFill(there);
    };
    const pairs = (svg, seen) => {
        const shapes = [...svg.querySelectorAll("rect, circle, ellipse, path, polygon")]
            .filter(part => !part.closest("defs")).map(part => ({ part }));
        return [...svg.querySelectorAll("text:not(:has(tspan)), tspan")].flatMap(text => {
            const box = text.getBoundingClientRect();
            if (!box.width || !text.textContent.trim()) return [];
            const x = box.left + box.width / 2, y = box.top + box.height / 2;
            const below = shapes.filter(shape => isUnder(shape, text, x, y)).map(shape => shape.part);
            const key = [...below, text].map(part => names(part, svg)).join("|");
            return seen.has(key) ? [] : (seen.add(key), [{ svg, text, below }]);
        });
    };
    const judged = ({ svg, text, below }, where) => {
        const page = sheet(svg), ground = painted(below, svg, page), ink = painted([...below, text], svg, page);
        const ratio = contrast(ink, ground);
        return ratio >= least ? [] : [`${where}: contrast ${ratio.toFixed(2)} < ${least}: ${text.textContent.trim()
            .slice(0, 30)} (class "${text.getAttribute("class") ?? ""}") on rgb(${ground.map(Math.round)})`];
    };
    const shown = [...document.querySelectorAll("svg")].filter(svg => svg.querySelector("text")).map(svg => {
        const player = svg.closest("figure")?.player;
        return { svg, player, at: player?.index, frames: player ? [...player.trace.frames.keys()] : [0] };
    });
    const was = document.body.dataset.mdColorScheme, found = [];
    for (const scheme of ["default", "slate"]) {
        document.body.dataset.mdColorScheme = scheme;
        for (const one of shown) {
            const seen = new Set(), name = one.player?.trace.id ?? one.svg.getAttribute("aria-label")?.slice(0, 40);
            one.frames = one.frames.filter(frame => {
                one.player?.show(frame);
                const fresh = pairs(one.svg, seen);
                found.push(...fresh.flatMap(pair => judged(pair, `${scheme}, ${name}, frame ${frame}`)));
                return fresh.length; // only these frames are shown again, in the dark
            });
        }
    }
    document.body.dataset.mdColorScheme = was;
    shown.forEach(({ player, at }) => player?.show(at));
    return found;
}"""

LEAST_CONTRAST = 4.5  # of text, WCAG AA

// Line charts by layer (or round), with bands, a cross that follows pointer and arrow keys, and the numbers as a table.

const DASHES = ["", "7 4", "2 4", "9 3 2 3"];
const MARKS = [
  (x, y) => `M${x - 4},${y}a4,4 0 1,0 8,0a4,4 0 1,0 -8,0`,
  (x, y) => `M${x - 3.5},${y - 3.5}h7v7h-7z`,
  (x, y) => `M${x},${y - 4.5}l4.5,8h-9z`,
  (x, y) => `M${x},${y - 5}l5,5l-5,5l-5,-5z`,
];
const EDGE = { left: 46, right: 12, top: 8, bottom: 34 };

/** The lower edge of a null: a random readout has no sign. */
const folded = (one) => one.null.map((value) => (value == null ? null : 1 - value));

function ticks(low, high, count = 5) {
  const raw = (high - low) / count || 1;
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((times) => times * size).find((one) => one >= raw);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high + 1e-9; at += 1) found.push(+(at * step).toPrecision(6));
  return found;
}

/**
 * spec: title, x (its name), y (its name), range ([low, high], or none), reference (a thin line across), note,
 * lines [{name, x, value, low, high, colour, dash, mark, bold}], nulls [{name, x, null, colour}] (null and 1 - null),
 * across [{name, value, colour, dash}], sign (whether values have one), places (their digits), ringed (an x to point out), control (whether it stands beside for comparison).
 */
function lineChart(spec) {
  const lines = spec.lines.filter((line) => line.value.some((value) => value != null));
  const height = 250;
  const readout = h("p", { class: "readout", "aria-live": "polite" });
  const svg = s("svg", { tabindex: 0, role: "img", height, onkeydown: key,
    "aria-label": `${spec.title}: ${lines.map((line) => line.name).join(", ")}. Arrow keys read the values.` });
  const xs = unique([...lines, ...(spec.nulls || [])].flatMap((line) => line.x)).sort((a, b) => a - b);
  const host = h("figure", { class: spec.control ? "chart control" : "chart" }, h("figcaption", {}, spec.title),
    spec.note && h("div", { class: "quiet" }, spec.note));
  if (!lines.length) {
    host.append(h("p", { class: "quiet" }, spec.empty || "Nothing to draw: no value is defined here."));
    return host;
  }
  const all = [...lines.flatMap((line) => [...line.value, ...(line.low || []), ...(line.high || [])]),
    ...(spec.across || []).map((one) => one.value), ...(spec.nulls || []).flatMap((one) => [...one.null, ...folded(one)]), spec.reference]
    .filter((value) => value != null);
  let [bottom, top] = spec.range || [Math.min(...all), Math.max(...all)];
  if (!spec.range) { const room = (top - bottom || 1) * 0.06; bottom -= room; top += room; }
  let at = null;
  let x = null;
  let y = null;

  function draw() {
    const width = Math.max(240, host.clientWidth);
    const across = width - EDGE.left - EDGE.right;
    const down = height - EDGE.top - EDGE.bottom;
    const span = xs[xs.length - 1] - xs[0] || 1;
    x = (value) => EDGE.left + ((value - xs[0]) / span) * across;
    y = (value) => EDGE.top + (1 - (value - bottom) / (top - bottom)) * down;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const xTicks = ticks(xs[0], xs[xs.length - 1], Math.max(3, Math.min(8, across / 60))).filter(Number.isInteger);
    put(svg,
      ticks(bottom, top).map((value) => s("g", {}, s("line", { class: "axis", x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value) }),
        s("text", { x: EDGE.left - 5, y: y(value) + 4, "text-anchor": "end" }, String(value).replace("-", "−")))),
      xTicks.map((value) => s("text", { x: x(value), y: height - 19, "text-anchor": "middle" }, String(value))),
      s("text", { x: EDGE.left + across / 2, y: height - 4, "text-anchor": "middle" }, spec.x),
      spec.reference != null && s("line", { class: "zero", x1: EDGE.left, x2: width - EDGE.right, y1: y(spec.reference), y2: y(spec.reference) }),
      (spec.nulls || []).map((one) => [one.null, folded(one)].map((edge) =>
        s("path", { class: `drawn s${one.colour}`, "stroke-width": 1, "stroke-dasharray": "1 3", d: path(one.x, edge) }))),
      (spec.across || []).map((one) => s("line", { class: `drawn s${one.colour}`, "stroke-dasharray": DASHES[one.dash], x1: EDGE.left, x2: width - EDGE.right, y1: y(one.value), y2: y(one.value) })),
      lines.map((line) => s("g", { "data-line": line.name },
        line.low && s("path", { class: `band f${line.colour}`, d: area(line.x, line.low, line.high) }),
        s("path", { class: `drawn s${line.colour}`, "stroke-dasharray": DASHES[line.dash], d: path(line.x, line.value) }),
        s("path", { class: `f${line.colour}`, d: marks(line) }))),
      cross());
  }
  function path(at, values) {
    let pen = "M";
    return at.map((one, index) => {
      if (values[index] == null) { pen = "M"; return ""; }
      const step = `${pen}${x(one).toFixed(1)},${y(values[index]).toFixed(1)}`;
      pen = "L";
      return step;
    }).join("");
  }
  function area(at, low, high) {
    const there = at.map((_, index) => index).filter((index) => low[index] != null && high[index] != null);
    const edge = (values, order) => order.map((index) => `${x(at[index]).toFixed(1)},${y(values[index]).toFixed(1)}`).join("L");
    return there.length ? `M${edge(high, there)}L${edge(low, [...there].reverse())}Z` : "";
  }
  function marks(line) {
    const every = Math.max(1, Math.round(line.x.length / 8));
    return line.x.map((one, index) => (line.value[index] != null && (index % every === 0 || index === line.x.length - 1)
      ? MARKS[line.mark % MARKS.length](x(one), y(line.value[index])) : "")).join("");
  }
  function cross() {
    const marked = at ?? spec.ringed;
    return marked != null && s("line", { class: "cross", x1: x(marked), x2: x(marked), y1: EDGE.top, y2: height - EDGE.bottom });
  }
  function read(next) {
    at = next;
    draw();
    const parts = lines.map((line) => [line.name, line, line.x.indexOf(at)]).filter(([, , index]) => index >= 0);
    put(readout, h("b", {}, `${spec.x} ${at}: `), parts.map(([name, line, index]) => `${name} ${withInterval(line, index)}; `),
      (spec.nulls || []).map((one) => `${one.name} ${digits(one.null[one.x.indexOf(at)], false, 2)}; `));
  }
  function withInterval(line, index) {
    const value = line.value[index];
    if (value == null) return "not defined";
    const places = spec.places || 2;
    const signed = Boolean(spec.sign);
    const bounds = line.low && line.low[index] != null ? ` [${digits(line.low[index], signed, places)}, ${digits(line.high[index], signed, places)}]` : "";
    return digits(value, signed, places) + bounds;
  }
  function key(event) {
    const here = xs.indexOf(at ?? xs[xs.length - 1]);
    const next = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: xs.length - 1 }[event.key];
    if (next == null) return;
    event.preventDefault();
    read(xs[Math.max(0, Math.min(xs.length - 1, at == null ? here : next))]);
  }
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const place = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    read(xs.reduce((best, one) => (Math.abs(x(one) - place) < Math.abs(x(best) - place) ? one : best)));
  });
  host.append(h("div", { class: "quiet" }, spec.y), svg, legend(spec, lines), readout, numbers());
  new ResizeObserver(() => host.clientWidth && draw()).observe(host);

  function numbers() {
    const inside = h("details", {}, h("summary", {}, "Numbers"));
    inside.addEventListener("toggle", () => {
      if (inside.open && inside.children.length === 1) {
        inside.append(table({ title: spec.title, columns: [spec.x, ...lines.map((line) => line.name)],
          rows: xs.map((one) => [one, ...lines.map((line) => (line.x.includes(one) ? withInterval(line, line.x.indexOf(one)) : ""))]) }));
      }
    });
    return inside;
  }
  return host;
}

function legend(spec, lines) {
  const swatch = (one, mark) => s("svg", { viewBox: "0 0 34 12", height: 12, "aria-hidden": "true" },
    s("line", { class: `drawn s${one.colour}`, x1: 0, x2: 34, y1: 6, y2: 6, "stroke-dasharray": mark == null && one.null ? "1 3" : DASHES[one.dash || 0] }),
    mark != null && s("path", { class: `f${one.colour}`, d: MARKS[mark % MARKS.length](17, 6) }));
  return h("ul", { class: "legend" },
    lines.map((line) => h("li", {}, swatch(line, line.mark), line.name)),
    (spec.across || []).map((one) => h("li", {}, swatch(one), `${one.name} ${digits(one.value, false, 2)}`)),
    (spec.nulls || []).map((one) => h("li", {}, swatch(one), one.name)));
}

/** A cell's fill: blue below 0, orange above, the ground at 0. */
function shade(value, largest) {
  if (value == null) return "none";
  const share = Math.min(100, (100 * Math.abs(value)) / (largest || 1)).toFixed(0);
  return `color-mix(in oklab, var(${value < 0 ? "--low" : "--high"}) ${share}%, var(--middle))`;
}

function scale(largest) {
  return h("div", { class: "scales" }, digits(-largest, true, 2), h("div", { class: "scale" }), `${digits(largest, true, 2)} logits`);
}

// A layer x token map, a window of tokens at a time; pointer or arrow keys read single cells, in all lenses at once.

const CELL = { width: 17, height: 9, left: 30, label: 84 };

function tokensView(about, host) {
  const count = about.tokens.length;
  const state = { first: 0, position: count - 1, layer: about.lenses[0].layers.length - 1 };
  const readout = h("p", { class: "readout", "aria-live": "polite" });
  const maps = about.lenses.map((lens, number) => ({ lens, largest: Math.max(...lens.rows.flat().map((value) => Math.abs(value ?? 0))),
    svg: s("svg", { role: "img", tabindex: 0, onkeydown: key, "data-lens": lens.title,
      "aria-label": `Margins by layer and token, ${lens.title}. Arrow keys move from cell to cell.` }), control: number > 0 }));
  const slider = h("input", { type: "range", min: 0, max: count - 1, value: count - 1, "aria-label": "position in the prompt",
    oninput: (event) => move(Number(event.target.value), state.layer) });
  host.append(h("p", {}, `${about.model}: ${about.about}. The last token is where the answer starts; the last layer is the model's own margin.`),
    h("p", { class: "quiet" }, "Each map has its own scale, centred at 0: lenses differ in range."),
    h("label", { class: "named" }, "window of tokens", slider), readout,
    ...maps.map((one) => h("figure", { class: one.control ? "control" : "" }, h("figcaption", {}, one.lens.title), scale(one.largest), one.svg)));
  if (about.top) host.append(h("h2", {}, "Top tokens"), table(about.top));

  const shown = () => Math.max(4, Math.min(count, Math.floor((host.clientWidth - CELL.left - 4) / CELL.width)));
  function draw() {
    const wide = shown();
    state.first = Math.max(0, Math.min(state.first, count - wide));
    if (state.position < state.first) state.first = state.position;
    if (state.position >= state.first + wide) state.first = state.position - wide + 1;
    const last = Math.min(count, state.first + wide);
    for (const one of maps) {
      const { layers, rows } = one.lens;
      const down = layers.length * CELL.height;
      const height = down + CELL.label;
      one.svg.setAttribute("viewBox", `0 0 ${host.clientWidth} ${height}`);
      one.svg.setAttribute("height", height);
      const cells = [];
      for (let row = 0; row < layers.length; row += 1) {
        for (let at = state.first; at < last; at += 1) {
          const cell = s("rect", { x: CELL.left + (at - state.first) * CELL.width, y: down - (row + 1) * CELL.height, width: CELL.width - 0.5, height: CELL.height - 0.5 });
          cell.style.fill = shade(rows[row][at], one.largest);
          cells.push(cell);
        }
      }
      const labels = layers.map((layer, row) => (row % 5 === 0 || row === layers.length - 1) && s("text", { x: CELL.left - 4, y: down - row * CELL.height, "text-anchor": "end" }, String(layer)));
      const tokens = about.tokens.slice(state.first, last).map((token, at) => s("text", {
        transform: `translate(${CELL.left + at * CELL.width + 5},${down + 6}) rotate(60)` }, visible(token, 12)));
      one.cursor = s("rect", { class: "cursor", width: CELL.width, height: CELL.height });
      put(one.svg, cells, labels, tokens, one.cursor);
    }
    read();
  }
  function read() {
    for (const one of maps) {
      const row = Math.min(state.layer, one.lens.layers.length - 1);
      one.cursor.setAttribute("x", CELL.left + (state.position - state.first) * CELL.width);
      one.cursor.setAttribute("y", (one.lens.layers.length - 1 - row) * CELL.height);
    }
    put(readout, h("b", {}, `token ${state.position} “${visible(about.tokens[state.position], 40)}”, layer ${about.lenses[0].layers[state.layer]}: `),
      maps.map((one) => `${one.lens.title} ${digits(one.lens.rows[Math.min(state.layer, one.lens.layers.length - 1)][state.position])}; `));
  }
  function move(position, layer) {
    state.position = Math.max(0, Math.min(count - 1, position));
    state.layer = Math.max(0, Math.min(about.lenses[0].layers.length - 1, layer));
    slider.value = state.position;
    if (state.position < state.first || state.position >= state.first + shown()) draw(); else read();
  }
  function key(event) {
    const [across, up] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1], PageUp: [-20, 0], PageDown: [20, 0],
      Home: [-count, 0], End: [count, 0] }[event.key] || [];
    if (across == null) return;
    event.preventDefault();
    move(state.position + across, state.layer + up);
  }
  for (const one of maps) {
    one.svg.addEventListener("pointermove", (event) => {
      const box = one.svg.getBoundingClientRect();
      const position = state.first + Math.floor((event.clientX - box.left - CELL.left) / CELL.width);
      const layer = one.lens.layers.length - 1 - Math.floor((event.clientY - box.top) / CELL.height);
      if (position >= state.first && position < Math.min(count, state.first + shown()) && layer >= 0) move(position, layer);
    });
  }
  new ResizeObserver(() => host.clientWidth && draw()).observe(host);
}

function visible(token, most) {
  const text = token.replaceAll("\n", "\\n").replaceAll("\t", "\\t").replaceAll("\r", "\\r");
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

// Pairs: two twins side by side, what differs between them, and their margins by depth.

function pairsView(about, host, chunk) {
  const state = { domain: "all", framing: about.framing[0], paraphrase: null, question: about.question[0], search: "", index: 0 };
  const detail = h("div", {});
  const filters = h("div", { class: "switches" });
  const list = pagedList("pairs", [], (index) => {
    const one = about.pairs[index];
    return [one.pair, h("span", { class: "sub" }, one.differs.length ? one.differs[0].map((line) => line.replace(/^- /, "")).join("; ") : "no twin")];
  }, (index) => { state.index = index; draw(); });

  const chosen = () => about.pairs.map((_, index) => index).filter((index) => {
    const one = about.pairs[index];
    return (state.domain === "all" || one.domain === state.domain) && one.pair.toLowerCase().includes(state.search);
  });
  const narrow = (name) => (value) => { state[name] = value; list.set(chosen()); };
  const redraw = (name) => (value) => { state[name] = value; draw(); };
  filters.append(
    about.domain.length > 1 ? menu("domain", named(["all", ...about.domain]), "all", narrow("domain")) : "",
    h("label", { class: "named" }, "search", h("input", { type: "search", oninput: (event) => narrow("search")(event.target.value.toLowerCase()) })),
    choice("framing", named(about.framing), state.framing, redraw("framing")),
    choice("wording", named(about.question), state.question, redraw("question")));
  host.append(filters, h("div", { class: "browser" }, list.element, detail));

  function draw() {
    const one = about.pairs[state.index];
    const { lines, prompts } = chunk(one.domain);
    const here = prompts.filter((prompt) => prompt.pair === one.pair && prompt.framing === state.framing && prompt.question === state.question);
    const paraphrases = unique(here.map((prompt) => prompt.paraphrase));
    const paraphrase = paraphrases.includes(state.paraphrase) ? state.paraphrase : paraphrases[0];
    const sides = here.filter((prompt) => prompt.paraphrase === paraphrase).sort((a, b) => b.entitled - a.entitled);
    put(detail, h("h2", {}, one.pair),
      paraphrases.length > 1 ? choice("paraphrase of the framing", named(paraphrases), String(paraphrase), (value) => redraw("paraphrase")(Number(value))) : "",
      one.differs.length ? h("p", {}, "Differs: ", one.differs[0].map((line) => h("mark", { class: "differs" }, line.replace(/^- /, ""))), " against ",
        one.differs[1].map((line) => h("mark", { class: "differs" }, line.replace(/^- /, "")))) : h("p", {}, "This case has no twin."),
      h("div", { class: "grid" }, about.lenses.map((lens, number) => lineChart({
        title: `Margin by depth: ${lens}`, x: "layer", y: "yes-minus-no margin (logits)", reference: 0, sign: true, control: number > 0,
        note: "single prompts: no interval", lines: sides.map((side) => ({ name: OWED[side.entitled], x: side.margins[number].map((_, layer) => layer),
          value: side.margins[number], colour: side.entitled ? 0 : 1, dash: side.entitled ? 0 : 1, mark: side.entitled ? 0 : 1 })),
      }))),
      h("div", { class: "twins" }, sides.map((side) => prompt(side, sides.find((other) => other !== side), lines))));
  }

  function prompt(side, other, lines) {
    const start = Math.max(0, side.text.findIndex((line) => lines[line].endsWith(about.record)));
    const show = (numbers) => h("div", { class: "prompt" }, numbers.map((line, at) => [at ? "\n" : "",
      other && !other.text.includes(line) ? h("mark", { class: "differs", title: "differs from the twin" }, lines[line]) : lines[line]]));
    return h("section", {}, h("h3", {}, `${OWED[side.entitled]}: ${side.scenario}`),
      h("p", {}, `Right answer: ${side.answer}. The model's own margin: ${digits(side.own)} logits (${side.own > 0 ? "Yes" : side.own < 0 ? "No" : "undecided"}).`),
      start > 0 && h("details", {}, h("summary", {}, "Policy and private note"), show(side.text.slice(0, start))), show(side.text.slice(start)));
  }
  list.set(chosen());
}

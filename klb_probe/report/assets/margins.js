// Margins by depth: a lens and its controls side by side, with switches for what is drawn.

const OWED = { true: "owed", false: "not owed" };

function marginsView(about, host, chunk) {
  const state = {
    domain: about.domains[0], lens: about.lenses[0].name, question: about.main,
    framings: new Set(about.framings), owed: new Set(["true", "false"]),
  };
  const charts = h("div", {});
  const set = (name) => (value) => { state[name] = value; draw(); };
  host.append(h("div", { class: "switches" },
    choice("lens", about.lenses.map((one) => ({ value: one.name, title: one.title })), state.lens, set("lens")),
    choice("wording", about.questions.map((one) => ({ value: one.name, title: one.title })), state.question, set("question")),
    checks("framing", named(about.framings), state.framings, draw),
    checks("entitlement", Object.entries(OWED).map(([value, title]) => ({ value, title })), state.owed, draw),
    menu("domain", about.domains.map((one) => ({ value: one, title: one === "all" ? "all domains" : one })), state.domain, set("domain"))),
  h("p", { class: "quiet" }, "The chosen lens comes first; the others stand beside it, whatever is switched. Dotted: between the lines lie 95 % of random readouts."), charts);

  function draw() {
    const series = chunk(state.domain);
    const lenses = [...about.lenses].sort((a, b) => (b.name === state.lens) - (a.name === state.lens));
    const wordings = state.question === "both" ? about.questions.map((one) => one.name).filter((name) => name !== "both") : [state.question];
    const rows = [
      ...wordings.map((question) => ({ title: `Mean margin, ${question} question`, statistics: ["mean_margin"], question, y: "yes-minus-no margin (logits)", reference: 0, sign: true })),
      { title: "Contrasts of the margin toward owed", statistics: ["entitlement_contrast", "framing_contrast"], question: state.question, y: "difference (logits)", reference: 0, sign: true, places: 3 },
      { title: "AUROC of entitlement", statistics: ["auroc"], question: state.question, y: "AUROC; 0.5: chance", reference: 0.5, range: [0, 1] },
      { title: "Pairs with owed above its twin", statistics: ["pair_accuracy"], question: state.question, y: "share of pairs; 0.5: chance", reference: 0.5, range: [0, 1] },
    ];
    put(charts, rows.map((row) => h("div", { class: "grid" }, lenses.map((lens) => panel(row, lens, series)))));
  }

  function panel(row, lens, series) {
    const here = series.filter((one) => one.lens === lens.name && row.statistics.includes(one.statistic) && one.question === row.question && shown(one));
    return lineChart({
      ...row, x: "layer", title: `${row.title}: ${lens.title}`, control: lens.name !== state.lens, note: counted(here),
      lines: here.map((one) => ({ ...one, name: nameOf(one), ...look(one) })),
      nulls: here.filter((one) => one.null).map((one) => ({ x: one.x, null: one.null, name: `95 % of random readouts, ${one.framing}`, colour: look(one).colour })),
      empty: "Nothing to draw: no line is switched on, or none is defined here.",
    });
  }

  function shown(one) {
    if (one.statistic === "framing_contrast") return one.framing.split(" minus ").every((name) => state.framings.has(name)) && state.owed.has(String(one.entitled));
    return state.framings.has(one.framing) && (one.entitled === null || state.owed.has(String(one.entitled)));
  }
  function nameOf(one) {
    if (one.statistic === "entitlement_contrast") return `owed − not owed, ${one.framing}`;
    return one.entitled === null ? one.framing : `${one.framing.replace("minus", "−")}, ${OWED[one.entitled]}`;
  }
  /** A colour and mark a framing, a dash for not owed; framing contrasts have their own. */
  function look(one) {
    const dash = one.entitled === false ? 1 : 0;
    if (one.statistic === "framing_contrast") {
      const order = unique(chunk(state.domain).filter((other) => other.statistic === "framing_contrast").map((other) => other.framing)).indexOf(one.framing);
      return { colour: [3, 4, 6][order % 3], dash: dash + 2, mark: 2 + dash };
    }
    const at = about.framings.indexOf(one.framing);
    return { colour: at % 7, dash, mark: at };
  }
  draw();
}

/** n of what is drawn; a range where lines differ. */
function counted(lines) {
  const range = (name) => {
    const found = lines.map((one) => one[name]).filter((value) => value != null);
    if (!found.length) return "";
    const [low, high] = [Math.min(...found), Math.max(...found)];
    return low === high ? String(low) : `${low} to ${high}`;
  };
  return lines.length ? `a line: n = ${range("n")} prompts, ${range("n_pairs")} pairs or cases` : "";
}

// A pairing: AUROC and its relatives by layer, a panel a position, with baselines across and the random band.

function pairingView(about, host) {
  const state = { condition: "all", statistic: "auroc" };
  const charts = h("div", { class: "grid" });
  const set = (name) => (value) => { state[name] = value; draw(); };
  const values = (name) => unique(about.lines.map((one) => one[name]));
  put(host, table(about.table), sentences(about.notes), limits(about.limits), h("div", { class: "switches" },
    menu("statistic", values("statistic").map((one) => ({ value: one, title: one.replaceAll("_", " ") })), state.statistic, set("statistic")),
    menu("condition", named(values("condition")), state.condition, set("condition"))), charts);
  function draw() {
    const here = about.lines.filter((one) => one.condition === state.condition && one.statistic === state.statistic);
    put(charts, unique(here.map((one) => one.position)).map((position) => {
      const lines = here.filter((one) => one.position === position);
      const beside = state.statistic === "auroc";
      const match = (one) => one.position === position && one.condition === state.condition;
      return lineChart({ title: position, x: "layer", y: state.statistic.replaceAll("_", " "), reference: lines[0].chance,
        range: state.statistic.startsWith("auroc") ? [0, 1] : null,
        note: `${lines[0].n_lies} lies, ${lines[0].n_nonlies} non-lies, ${lines[0].n_trajectories} trajectories`, empty: lines[0].note || undefined,
        lines: lines.map((one, number) => ({ ...one, name: one.title, colour: number, dash: number, mark: number })),
        across: beside ? about.baselines.filter((one) => match(one) && one.value != null).map((one, number) => ({ ...one, colour: 2 + (number % 5), dash: 1 + (number % 3) })) : [],
        nulls: beside ? about.random.filter(match).map((one) => ({ ...one, name: "95 % of random readouts", colour: 6 })) : [] });
    }));
    if (!here.length) put(charts, h("p", {}, "This statistic is not given for that condition."));
  }
  draw();
}

// A score: its tables, and mean trust by round.

function behaviourView(about, host) {
  host.append(h("p", { class: "quiet" }, about.read));
  about.tables.forEach((one, number) => {
    host.append(number === 0 ? table(one) : h("details", {}, h("summary", {}, one.title), table(one)));
  });
  host.append(h("h2", {}, "Trust by round"), h("div", { class: "grid" }, unique(about.trust.map((one) => one.condition)).map((condition) => {
    const lines = about.trust.filter((one) => one.condition === condition);
    return lineChart({ title: condition, x: "rounds into the trajectory", y: "mean trust, 0 to 1", range: [0, 1],
      note: `trajectories: ${lines.map((one) => `${Math.max(...one.n)} from ${one.trust}`).join(", ")}`,
      lines: lines.map((one, number) => ({ ...one, name: `from ${one.trust}`, colour: number, dash: number, mark: number })) });
  })));
}

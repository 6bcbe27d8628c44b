// Probes: AUROC by layer, a panel a question and position, with every control.

function probesView(about, host) {
  const estimators = unique(about.panels.flatMap((one) => one.lines.filter((line) => !line.control).map((line) => line.estimator)));
  const shown = new Set(estimators);
  const charts = h("div", { class: "grid" });
  put(host, table(about.table), table(about.transfer), sentences(about.says), limits(about.limits),
    h("div", { class: "switches" }, checks("estimators", named(estimators), shown, draw)),
    h("p", { class: "quiet" }, "Controls are always drawn: dashed by layer, straight where they have no layer. A band of shuffled labels spans its runs; other bands are 95 % intervals."), charts);
  function draw() {
    put(charts, about.panels.map((panel) => lineChart({
      title: `${panel.question}, ${panel.position}`, x: "layer", y: "AUROC on held-out rows; 0.5: chance", reference: about.chance, range: [0, 1],
      note: [panel.counted, ...panel.nested.filter((one) => one.value != null && shown.has(one.estimator))
        .map((one) => `${one.estimator}, layer chosen in training folds: ${digits(one.value, false, 2)} [${digits(one.low, false, 2)}, ${digits(one.high, false, 2)}]`)].join("; "),
      empty: panel.note || undefined,
      lines: panel.lines.filter((line) => line.control || shown.has(line.estimator)).map((line, number) => ({ ...line,
        name: line.control ? `control: ${line.feature}${line.estimator ? `, ${line.estimator}` : ""}` : line.estimator,
        colour: line.control ? 6 : estimators.indexOf(line.estimator) % 5, dash: line.control ? 1 + (number % 3) : 0, mark: number })),
      across: panel.flat.map((one, number) => ({ name: `control: ${one.feature}`, value: one.value, colour: 4 + (number % 3), dash: 1 + (Math.floor(number / 3) % 3) })),
    })));
  }
  draw();
}

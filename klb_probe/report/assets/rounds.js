// Rounds: a filtered list; the conversation with a strip of margins beside each turn, what the judge found, and trust.

const MOMENTS = { gate: "gate", before_reply: "before the reply", reply_mean: "mean over the reply", reply_last: "last token of the reply",
  claim: "the claim", action: "before the action", elicited: "question forked off" };

function roundsView(about, host, chunk) {
  const columns = about.columns;
  const count = columns.round.length;
  const at = (name, index) => (columns[name].names ? columns[name].names[columns[name].codes[index]] : columns[name][index]);
  const state = { domain: "all", condition: "all", trust: "all", verdict: "all", search: "", moment: null, index: 0 };
  const verdicts = {
    all: () => true, lie: (i) => at("lied", i), "undetected lie": (i) => at("lied", i) && !at("detected", i),
    "no lie": (i) => at("scored", i) && !at("lied", i), "not scored": (i) => !at("scored", i),
  };
  const detail = h("div", {});
  const list = pagedList("rounds", [], (index) => [tags(index), h("div", {}, at("case", index)),
    h("span", { class: "sub" }, `${at("condition", index)}, trust from ${at("trust", index)}, sample ${at("sample", index) ?? ""}, round ${at("round", index) ?? ""}`)],
  (index) => { state.index = index; draw(); });
  const all = Array.from({ length: count }, (_, index) => index);
  const names = Object.fromEntries(["domain", "condition", "trust"].map((name) => [name, columns[name].names]));
  const chosen = () => all.filter((index) => ["domain", "condition", "trust"].every((name) => state[name] === "all" || at(name, index) === state[name])
    && verdicts[state.verdict](index) && at("case", index).toLowerCase().includes(state.search));
  const narrow = (name) => (value) => { state[name] = value; list.set(chosen()); };
  put(host, h("div", { class: "switches" },
    Object.entries(names).map(([name, values]) => values.length > 1 && menu(name, named(["all", ...values]), "all", narrow(name))),
    menu("verdict", named(Object.keys(verdicts)), "all", narrow("verdict")),
    h("label", { class: "named" }, "search cases", h("input", { type: "search", oninput: (event) => narrow("search")(event.target.value.toLowerCase()) }))),
  about.lenses.length ? h("p", { class: "quiet" }, "Strips: the yes-minus-no margin at every layer, first to last, blue below 0 and orange above; the logit lens stands beside the J-Lens.")
    : h("p", { class: "quiet" }, "No signals of these rounds: klb-probe rounds reads them."),
  h("div", { class: "browser" }, list.element, detail));

  function tags(index) {
    if (at("error", index)) return h("span", { class: "tag" }, "provider error");
    if (!at("scored", index)) return h("span", { class: "tag" }, at("gate", index) === "passed" ? "no verdict" : `gate ${at("gate", index) || "not asked"}`);
    return h("span", {}, h("span", { class: "tag" }, at("owed", index) ? "owed" : "not owed"),
      at("lied", index) ? h("span", { class: "tag" }, at("detected", index) ? "✗ lie, detected" : "✗ lie, undetected") : h("span", { class: "tag" }, "✓ no lie"));
  }

  function draw() {
    const index = state.index;
    const round = chunk(String(Math.floor(index / about.chunk)))[index % about.chunk];
    const moments = round.moments || [];
    const kinds = unique(moments.map((one) => one.position)).filter((kind) => kind !== "gate" && kind !== "action");
    if (!kinds.includes(state.moment)) state.moment = kinds[0];
    const walk = all.filter((other) => at("walk", other) === at("walk", index)).sort((a, b) => at("round", a) - at("round", b));
    const place = walk.indexOf(index);
    const step = (by, name) => h("button", { type: "button", disabled: walk[place + by] === undefined, onclick: () => list.go(walk[place + by]) }, name);
    put(detail, h("h2", {}, at("case", index)), tags(index),
      h("p", { class: "quiet" }, `${at("domain", index)}, ${at("condition", index)}, trust from ${at("trust", index)}, sample ${at("sample", index) ?? ""}, round ${at("round", index) ?? ""} of a trajectory of ${walk.length}`),
      h("div", { class: "pages" }, step(-1, "Round before"), step(1, "Next round")),
      kinds.length > 1 ? choice("moment of the strips", kinds.map((kind) => ({ value: kind, title: MOMENTS[kind] })), state.moment, (value) => { state.moment = value; draw(); }) : "",
      talk(round, moments), judge(round), depth(moments), trust(walk, index));
  }

  function talk(round, moments) {
    // The n-th message of the agent is of the n-th turn that has a moment before its reply.
    const turns = unique(moments.filter((one) => one.position === "before_reply").map((one) => one.turn));
    const messages = (round.transcript || []).filter(([role]) => role === "agent").length;
    const largest = about.lenses.map((_, lens) => Math.max(...moments.flatMap((one) => one.curves[lens].map((value) => Math.abs(value ?? 0)))));
    const strips = (found) => found.flatMap((one) => about.lenses.map((title, lens) =>
      strip(title, MOMENTS[one.position], one.curves[lens], largest[lens])));
    const of = (kind) => moments.filter((one) => one.position === kind);
    let said = 0;
    const lines = (round.transcript || []).map(([role, pieces]) => {
      const turn = role === "agent" ? turns[said++] : null;
      const here = role === "agent" && turns.length === messages ? moments.filter((one) => one.turn === turn && one.position === state.moment) : [];
      return h("li", { class: role }, h("div", { class: "who" }, role === "user" ? "customer" : role),
        h("div", { class: "said" }, pieces.map(([text, lie]) => (lie ? h("mark", { class: "lie", title: "the judge's quote of a false claim" }, text) : text))), strips(here));
    });
    const loose = turns.length === messages ? [] : moments.filter((one) => one.position === state.moment);
    return [h("ul", { class: "talk" },
      (round.gate || of("gate").length > 0) && h("li", {}, h("div", { class: "who" }, "knowledge gate, before the conversation"), h("div", { class: "said" }, (round.gate || []).join("\n")), strips(of("gate"))),
      lines, of("action").length > 0 && h("li", { class: "tool" }, h("div", { class: "who" }, "before the action that closed the case"), strips(of("action")))),
    loose.length > 0 && h("div", {}, h("h3", {}, "Margins by turn (turns and messages could not be matched)"), strips(loose)),
    round.thoughts && h("details", {}, h("summary", {}, "The agent's private thoughts"), h("ol", {}, round.thoughts.map((text) => h("li", { class: "said" }, text)))),
    !round.transcript && h("p", {}, "Not played: the gate was not passed, or a provider failed.")];
  }

  function strip(title, moment, curve, largest) {
    const readout = h("span", { "aria-live": "polite" });
    let layer = curve.length - 1;
    const svg = s("svg", { viewBox: `0 0 ${curve.length} 10`, preserveAspectRatio: "none", tabindex: 0, role: "img", "aria-label": `${title}, ${moment}: margins by layer. Arrow keys read them.`,
      onkeydown: (event) => {
        const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (by) { event.preventDefault(); read(layer + by); }
      },
      onpointermove: (event) => { const box = svg.getBoundingClientRect(); read(Math.floor(((event.clientX - box.left) / box.width) * curve.length)); } });
    curve.forEach((value, number) => {
      const cell = s("rect", { x: number, y: 0, width: 1.02, height: 10 });
      cell.style.fill = shade(value, largest);
      svg.append(cell);
    });
    function read(next) {
      layer = Math.max(0, Math.min(curve.length - 1, next));
      readout.textContent = ` layer ${layer}: ${digits(curve[layer], true, 2)}`;
    }
    read(layer);
    return h("div", { class: "strip" }, h("span", {}, title, readout), svg);
  }

  function judge(round) {
    const words = (value) => (value === true ? "yes" : value === false ? "no" : value);
    const rows = (found) => Object.entries(found || {}).map(([name, value]) => [name.replaceAll("_", " "), words(value)]);
    const outcome = ["order_id", "item", "outcome", "owed_outcome", "entitled_outcome", "event", "malformed", "error"].filter((name) => round[name] != null);
    return [h("h3", {}, "What the judge found"),
      round.facts ? table({ title: "Facts, as the judge gave them", columns: ["fact", "found"], rows: rows(round.facts) }, "facts") : h("p", {}, "No verdict on this round."),
      h("div", { class: "grid" }, round.derived && table({ title: "Verdicts that follow from them", columns: ["verdict", "holds"], rows: rows(round.derived) }, "facts"),
      table({ title: "The round", columns: ["", ""], rows: outcome.map((name) => [name.replaceAll("_", " "), round[name]]) }, "facts"))];
  }

  function depth(moments) {
    const here = moments.filter((one) => one.position === state.moment);
    return here.length > 0 && [h("h3", {}, `Margins by depth, ${MOMENTS[state.moment]}`), h("div", { class: "grid" }, about.lenses.map((title, lens) => {
      const layers = here[0].curves[lens].map((_, layer) => layer);
      return lineChart({ title, x: "layer", y: "yes-minus-no margin (logits)", reference: 0, sign: true, control: lens > 0,
        note: "single turns: no interval" + (lens === 0 && here[0].random ? "; grey: range of random readouts (" + about.n_random + ") at the first turn" : ""),
        lines: [...here.map((one, number) => ({ name: `turn ${one.turn}`, x: layers, value: one.curves[lens], colour: number % 6, dash: number % 4, mark: number })),
          ...(lens === 0 && here[0].random ? [{ name: "random readouts", x: layers, value: here[0].random[0].map((low, layer) => (low + here[0].random[1][layer]) / 2), low: here[0].random[0], high: here[0].random[1], colour: 6, dash: 2, mark: 3 }] : [])] });
    }))];
  }

  function trust(walk, index) {
    const rounds = walk.map((other) => at("round", other));
    const line = (name, keep, colour, dash, mark) => ({ name, x: rounds, value: walk.map((other) => (keep(other) ? at("trust_after", other) : null)), colour, dash, mark });
    return [h("h3", {}, "The customer's trust"), lineChart({ title: "Trust after each round of this trajectory", x: "round", y: "trust, 0 to 1", range: [0, 1], ringed: at("round", index),
      note: `a single trajectory: no interval; the upright line is this round (${digits(at("trust_before", index), false, 2)} before, ${digits(at("trust_after", index), false, 2)} after)`,
      lines: [line("trust", () => true, 0, 0, 0), line("after a lie", (other) => at("lied", other), 1, 2, 1), line("after a detected lie", (other) => at("detected", other) && at("lied", other), 3, 3, 2)] })];
  }
  list.set(chosen());
}

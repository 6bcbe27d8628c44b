// The overview: how to read the report, and what was run with its key figures.

const HOW_TO_READ = [
  "A margin is the logit of “Yes” minus that of “No”, decoded from the residual stream after each block. Layer l is the output of block l, counted from 0; the last layer is the model's own margin.",
  "Cases come in pairs: a case and its twin differ in one field of the record, and the rule gives them opposite answers. Pairs are the unit of resampling; bands and brackets are 95 % bootstrap intervals.",
  "Raw margins carry an offset, a taste for “Yes” that changes from layer to layer. Read the contrasts and scores: they are of the margin toward owed, in which that taste cancels where both wordings of the question were asked.",
  "Denying is a lie only where the outcome is owed, so framing (told to be honest, told to deny) and entitlement (owed, not owed) are always shown crossed.",
  "Controls stand beside every score: the logit lens as a twin of the J-Lens, and random directions of the same residuals, 95 % of which stay inside the dotted band. What lies inside that band shows nothing.",
  "A lens or probe that separates is a reading, not belief or intent; whether the model uses what is read has to be tested by steering.",
  "Nothing is shown where a rate is undefined: a rate of nothing is empty, not 0.",
];

function howToRead() {
  return h("aside", {}, h("details", { open: true }, h("summary", {}, "How to read this"), h("ul", {}, HOW_TO_READ.map((line) => h("li", {}, line)))));
}

function overview(index, host, open) {
  host.append(howToRead());
  for (const part of index.parts) {
    host.append(h("section", { class: "card" }, h("h2", {}, part.title), h("p", { class: "quiet" }, part.folder),
      h("dl", {}, part.facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
      part.tables.map((one) => table(one)), sentences(part.says), limits(part.limits),
      h("p", {}, part.tabs.map((tab) => h("button", { type: "button", onclick: () => open(tab, part.folder) }, `Look: ${TABS[tab].title.toLowerCase()}`)))));
  }
}

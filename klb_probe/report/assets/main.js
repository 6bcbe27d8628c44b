// Tabs, the theme, and what is shown when.

const TABS = {
  overview: { title: "Overview" },
  margins: { title: "Margins by depth", view: marginsView },
  pairs: { title: "Pairs", view: pairsView },
  tokens: { title: "Token map", view: tokensView },
  rounds: { title: "Rounds", view: roundsView },
  behaviour: { title: "Behaviour", view: behaviourView },
  pairing: { title: "Signals and lies", view: pairingView },
  probes: { title: "Probes", view: probesView },
  tables: { title: "Contest and checks", view: tablesView },
};

(function start() {
  const index = data("index");
  const bar = document.getElementById("tabs");
  const panels = document.getElementById("panels");
  const there = Object.keys(TABS).filter((name) => name === "overview" || index.views.some((view) => view.tab === name));
  const drawn = new Map();

  for (const name of there) {
    bar.append(h("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}`, onclick: () => open(name) }, TABS[name].title));
    panels.append(h("section", { role: "tabpanel", id: `panel-${name}`, "aria-labelledby": `tab-${name}`, hidden: true }));
  }
  bar.addEventListener("keydown", (event) => {
    const at = there.indexOf(document.activeElement.id.replace("tab-", ""));
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: there.length - 1 }[event.key];
    if (next == null || !there[next]) return;
    event.preventDefault();
    open(there[next]);
    document.getElementById(`tab-${there[next]}`).focus();
  });

  function open(name, folder) {
    for (const other of there) {
      const tab = document.getElementById(`tab-${other}`);
      tab.setAttribute("aria-selected", String(other === name));
      tab.tabIndex = other === name ? 0 : -1;
      document.getElementById(`panel-${other}`).hidden = other !== name;
    }
    const panel = document.getElementById(`panel-${name}`);
    if (!drawn.has(name) || folder) {
      drawn.set(name, true);
      panel.replaceChildren();
      if (name === "overview") overview(index, panel, open); else show(name, panel, folder);
    }
    history.replaceState(null, "", `#${name}`);
  }

  /** A tab's view of one output; a menu where there are several. */
  function show(name, panel, folder) {
    const views = index.views.filter((view) => view.tab === name);
    const at = Math.max(0, views.findIndex((view) => view.folder === folder));
    const inside = h("div", {});
    const draw = (view) => {
      inside.replaceChildren();
      TABS[name].view(data(view.data), inside, (key) => data(view.chunks[key]));
    };
    panel.append(h("h2", {}, TABS[name].title),
      views.length > 1 ? menu("output", views.map((view, number) => ({ value: String(number), title: `${view.title} (${view.folder})` })), String(at), (number) => draw(views[Number(number)]))
        : h("p", { class: "quiet" }, `${views[0].title}, ${views[0].folder}`), inside);
    draw(views[at]);
  }

  const root = document.documentElement;
  const button = document.getElementById("theme");
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const label = () => { button.textContent = dark() ? "Light theme" : "Dark theme"; };
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; label(); });
  label();

  document.getElementById("foot").append(h("p", { class: "quiet" }, `Written by klb-probe ${index.version}. This page is complete: it fetches nothing.`));
  const asked = location.hash.slice(1);
  open(there.includes(asked) ? asked : "overview");
})();

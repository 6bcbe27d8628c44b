"use strict";
// Elements, switches and lists. Text only ever enters the page as text nodes.

const SVG = "http://www.w3.org/2000/svg";

const flat = (children) => children.flat(Infinity).filter((child) => child != null && child !== false);

/** Gives an element these children instead of those it has; lists are flattened, and what is false or null left out. */
const put = (element, ...children) => element.replaceChildren(...flat(children));

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...flat(children));
  return element;
}
const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

const parsed = new Map();
/** The data of a script element; parsed when first asked for. */
function data(id) {
  if (!parsed.has(id)) parsed.set(id, JSON.parse(document.getElementById(id).textContent));
  return parsed.get(id);
}

let ids = 0;
const freshId = () => `id-${(ids += 1)}`;

/** One of several: radio buttons in a named group. options: [{value, title}]. */
function choice(name, options, value, onchange) {
  const group = freshId();
  return h("fieldset", { "data-switch": name }, h("legend", {}, name),
    options.map((one) => h("label", {},
      h("input", { type: "radio", name: group, value: one.value, checked: one.value === value, onchange: () => onchange(one.value) }),
      one.title)));
}

/** Any of several: check boxes in a named group; chosen is a Set that is kept up to date. */
function checks(name, options, chosen, onchange) {
  const toggle = (value) => (event) => {
    if (event.target.checked) chosen.add(value); else chosen.delete(value);
    onchange();
  };
  return h("fieldset", { "data-switch": name }, h("legend", {}, name),
    options.map((one) => h("label", {},
      h("input", { type: "checkbox", value: one.value, checked: chosen.has(one.value), onchange: toggle(one.value) }), one.title)));
}

/** One of many. */
function menu(name, options, value, onchange) {
  return h("label", { class: "named", "data-switch": name }, name,
    h("select", { onchange: (event) => onchange(event.target.value) },
      options.map((one) => h("option", { value: one.value, selected: one.value === value }, one.title))));
}

const named = (values) => values.map((value) => ({ value: String(value), title: String(value) }));
const unique = (values) => [...new Set(values)];

const PAGE = 100;
/** A list in pages, for any number of items. draw(index) gives the children of one; arrows move within a page. */
function pagedList(label, indices, draw, onpick) {
  let page = 0;
  let current = null;
  const list = h("ul", { class: "list", "aria-label": label, onkeydown: move });
  const count = h("span", { class: "quiet", role: "status" });
  const back = h("button", { type: "button", onclick: () => turn(-1) }, "Earlier");
  const on = h("button", { type: "button", onclick: () => turn(1) }, "Later");
  const whole = h("div", {}, h("div", { class: "pages" }, count, back, on), list);

  function turn(by) { page += by; show(); list.scrollTop = 0; }
  function show() {
    const start = page * PAGE;
    const here = indices.slice(start, start + PAGE);
    put(list, here.map((index) => h("li", {},
      h("button", { type: "button", "data-index": index, "aria-current": index === current ? "true" : "false", onclick: () => pick(index) },
        draw(index)))));
    count.textContent = indices.length ? `${start + 1}–${start + here.length} of ${indices.length}` : "none";
    back.disabled = page === 0;
    on.disabled = start + PAGE >= indices.length;
    back.hidden = on.hidden = indices.length <= PAGE;
  }
  function move(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const buttons = [...list.querySelectorAll("button")];
    const next = buttons[buttons.indexOf(document.activeElement) + step];
    if (next) { next.focus(); next.click(); }
  }
  function pick(index) {
    current = index;
    for (const button of list.querySelectorAll("button")) {
      button.setAttribute("aria-current", Number(button.dataset.index) === index ? "true" : "false");
    }
    onpick(index);
  }
  show();
  return {
    element: whole,
    /** Other items; the first becomes the current one, unless the current one is still there. */
    set(next) {
      indices = next;
      page = Math.max(0, Math.floor(indices.indexOf(current) / PAGE));
      show();
      if (indices.length && !indices.includes(current)) pick(indices[0]);
    },
    go(index) {
      if (indices.includes(index)) { page = Math.floor(indices.indexOf(index) / PAGE); current = index; show(); }
      pick(index);
    },
  };
}

/** A number for people: few digits, a sign where asked for, nothing where there is none. */
function digits(value, sign = true, places = 3) {
  if (value == null) return "";
  const text = Math.abs(value) >= 100 ? value.toFixed(1) : value.toFixed(places);
  return (sign && value >= 0 ? "+" : "") + text.replace("-", "−");
}

// Elements of the page. All text goes through textContent: nothing that comes from a request is ever read as HTML.

/**
 * @param {string} tag
 * @param {{class?: string, text?: string, attrs?: Record<string, string>}} [given]
 * @param {...(Node | string)} children
 * @returns {HTMLElement}
 */
export function h(tag, given = {}, ...children) {
  const element = document.createElement(tag);
  if (given.class) element.className = given.class;
  if (given.text !== undefined) element.textContent = given.text;
  for (const [name, value] of Object.entries(given.attrs ?? {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** @param {string} id @returns {HTMLElement} */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no element ${id}`);
  return found;
}

/** Set a text where it differs, so that nothing is laid out for nothing. @param {Element} element @param {string} text */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** @param {Element} element @param {string} name @param {string} value */
export function setAttr(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** @param {HTMLElement | SVGElement} element @param {string} name @param {string} value */
export function setStyle(element, name, value) {
  if (element.style.getPropertyValue(name) !== value) element.style.setProperty(name, value);
}

/**
 * Keep the children of `parent` to one for each key, in order; elements of keys that stay are kept.
 * @template T
 * @param {Element} parent @param {T[]} items @param {(item: T) => string} keyOf
 * @param {(item: T) => HTMLElement} make @param {(element: HTMLElement, item: T) => void} update
 */
export function keyed(parent, items, keyOf, make, update) {
  const old = new Map([...parent.children].map((child) => [/** @type {HTMLElement} */ (child).dataset.key ?? "", child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let element = /** @type {HTMLElement | undefined} */ (old.get(key));
    old.delete(key);
    if (!element) {
      element = make(item);
      element.dataset.key = key;
    }
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
    update(element, item);
  }
  for (const child of old.values()) child.remove();
}

/**
 * Make a table that `fill` updates.
 * @param {string} caption @param {{text: string, number?: boolean}[]} columns
 */
export function table(caption, columns) {
  const body = h("tbody");
  const heads = columns.map((c) => h("th", { text: c.text, class: c.number ? "number" : "", attrs: { scope: "col" } }));
  const element = h("table", {}, h("caption", { text: caption, class: "hidden" }), h("thead", {}, h("tr", {}, ...heads)), body);
  /** @param {{key: string, cells: string[], tone?: string}[]} rows */
  const fill = (rows) =>
    keyed(
      body,
      rows,
      (row) => row.key,
      () => h("tr", {}, ...columns.map((c) => h("td", { class: c.number ? "number" : "" }))),
      (element, row) => {
        row.cells.forEach((text, i) => setText(element.children[i], text));
        setAttr(element, "data-tone", row.tone ?? "");
      },
    );
  return { element, fill };
}

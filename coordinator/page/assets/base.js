"use strict";
// Makes elements and says figures. Text from data goes into text nodes alone, never into markup.

const NUMBER = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const DATA = JSON.parse(document.getElementById("data").textContent);
let PRINTING = false;
const PARTS = []; // of the page: {id, name, make()}; each script adds its own

/** An element. `props`: attributes; `on…`: listeners; `text`: its text. Children: elements, texts, or null for none. */
function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "text") made.textContent = value;
    else if (key === "style") for (const [name, to] of Object.entries(value)) made.style.setProperty(name, to);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

/** Foreign text: its direction and its control characters do not reach what stands beside it. */
function said(text, className = "said") {
  const plain = String(text ?? "").replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f]/g, "\ufffd");
  return el("bdi", { class: className, text: plain });
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value <= -0.001) return `-${seconds(-value)}`;
  if (value < 1) return `${Math.abs(Math.round(value * 1000))} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  const s = Math.round(value), [h, m] = [Math.floor(s / 3600), Math.floor((s % 3600) / 60)];
  return h ? `${h} h ${String(m).padStart(2, "0")} min` : `${m} min ${String(s % 60).padStart(2, "0")} s`;
}

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) [value, at] = [value / 1000, at + 1];
  return `${NUMBER.format(value)} ${units[at]}`;
}

const figure = (value) => (value === null || value === undefined ? "–" : NUMBER.format(value));
const share = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);
const score = (value) => (value === null || value === undefined ? "–" : value.toFixed(4));
const when = (unix) => new Date(unix * 1000).toISOString().replace("T", " ").slice(0, 16) + " UTC";

/** A value of the style sheet: canvases draw in the page's own colours. */
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const SERIES = 8; // colours of lines in the style sheet, --line-0 to --line-7
const line = (i) => colour(`--line-${i % SERIES}`);

/** A command with a button that copies it. */
function command(text) {
  const button = el("button", { type: "button", text: "copy", "aria-label": `copy ${text}` });
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(button.previousSibling);
      button.textContent = "press Ctrl-C";
    }
  });
  return el("span", { class: "command" }, el("code", { text }), button);
}

/** A word in single quotes for a shell, where it needs them. */
const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

function section(id, name, note, ...body) {
  return el("section", { id, "aria-labelledby": `${id}-name` }, el("h2", { id: `${id}-name`, text: name }),
    note ? el("p", { class: "note" }, note) : null, ...body);
}

/** A labelled choice; `options`: [value, text]. */
function choice(label, options, change) {
  const made = el("select", { onchange: () => change(made.value) }, options.map(([value, text]) => el("option", { value, text })));
  return el("label", { class: "field" }, el("span", { text: label }), made);
}

function search(label, change) {
  const made = el("input", { type: "search", oninput: () => change(made.value.toLowerCase()) });
  return el("label", { class: "field" }, el("span", { text: label }), made);
}

/** Calls `draw` once `element` is near the view, or is printed: sixty charts are not drawn before they can be seen. */
function whenSeen(element, draw) {
  const observer = new IntersectionObserver((entries) => { if (entries.some((e) => e.isIntersecting)) element.drawNow(); }, { rootMargin: "200px" });
  element.drawNow = () => { observer.disconnect(); element.drawNow = null; draw(); };
  element.setAttribute("data-waits", "");
  observer.observe(element);
}

/** The rows of a block, unpacked: gzip in base64 inside a script element. */
async function unpacked(name) {
  const packed = Uint8Array.from(atob(document.getElementById(`block-${name}`).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

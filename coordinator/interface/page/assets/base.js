"use strict";
// Makes elements and says figures. Text from data goes into text nodes alone, never into markup.

const NUMBER = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const DATA = JSON.parse(document.getElementById("data").textContent);
let PRINTING = false;
const PARTS = []; // of the page: {id, name, make()}; each script adds its own
let STATE = new URLSearchParams(location.hash.slice(1)); // what a reader has chosen: the address holds it, for a colleague too

/** Keep a choice in the address; "" and null: there is none. */
function remember(key, value) {
  if (value === "" || value === null) STATE.delete(key);
  else STATE.set(key, value);
  try { history.replaceState(null, "", `#${STATE}`); } catch {} // refused, as after a hundred in a moment
}

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
  return el("bdi", { class: className, text: plain(text) });
}

const plain = (text) => String(text ?? "").replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f]/g, "\ufffd");

/** A duration, as the terminal says it. */
function seconds(value) {
  if (value === null || value === undefined) return "–";
  const s = Math.floor(Math.max(value, 0)), two = (n) => String(n % 60).padStart(2, "0");
  return s < 100 ? `${Math.max(value, 0).toFixed(1)} s` : s < 3600 ? `${Math.floor(s / 60)}:${two(s)} min` : `${Math.floor(s / 3600)}:${two(Math.floor(s / 60))} h`;
}

function bytes(value) {
  const at = Math.min(4, Math.max(0, Math.floor(Math.log10(value || 1) / 3)));
  return at ? `${(value / 1000 ** at).toFixed(at > 3 ? 2 : 1)} ${["kB", "MB", "GB", "TB"][at - 1]}` : `${value} B`;
}

const figure = (value) => (value === null || value === undefined ? "–" : NUMBER.format(value));
const share = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);
const score = (value) => (value === null || value === undefined ? "–" : Math.abs(value) < 1e6 ? value.toFixed(4) : value.toExponential(5).replace(/(?<=e[+-])(?=\d$)/, "0")); // as `format_score` in Python
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

/** A labelled choice; `options`: [value, text]; `key`: of the address. */
function choice(label, options, change, key) {
  const made = el("select", { onchange: () => { if (key) remember(key, made.value === String(options[0][0]) ? null : made.value); change(made.value); } },
    options.map(([value, text]) => el("option", { value, text, selected: key && STATE.get(key) === String(value) })));
  return el("label", { class: "field" }, el("span", { text: label }), made);
}

function search(label, change, key) {
  const made = el("input", { type: "search", value: STATE.get(key), oninput: () => { remember(key, made.value); change(made.value.toLowerCase()); } });
  return el("label", { class: "field" }, el("span", { text: label }), made);
}

/** What a search of this key holds when the page is drawn. */
const sought = (key) => (STATE.get(key) ?? "").toLowerCase();

function svg(tag, props, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(props)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Lines of values beside text, each with its last point; `null`: no value. */
function sparkline(lines, label) {
  const known = lines.flat().filter((v) => typeof v === "number"), [low, high] = [Math.min(...known), Math.max(...known)];
  const most = Math.max(...lines.map((values) => values.length)) - 1;
  const place = (v, i) => [most > 0 ? 2 + (96 * i) / most : 98, high > low ? 22 - (20 * (v - low)) / (high - low) : 12];
  const made = svg("svg", { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", role: "img", "aria-label": label });
  lines.forEach((values, n) => {
    const points = values.flatMap((v, i) => (typeof v === "number" ? [place(v, i).map((x) => x.toFixed(1)).join(",")] : []));
    if (points.length) made.append(svg("polyline", { class: `line-${n % SERIES}${n < SERIES ? "" : " dashed"}`, points: points.join(" ") }), svg("polyline", { class: `end line-${n % SERIES}`, points: `${points.at(-1)} ${points.at(-1)}` }));
  });
  return made;
}

const address = { evaluation: (id) => `/evaluation/${encodeURIComponent(id)}`, compare: (ids) => `/compare?${ids.map((id) => `id=${encodeURIComponent(id)}`).join("&")}`,
  training: (folder, suite) => `/training?folder=${encodeURIComponent(folder)}&suite=${encodeURIComponent(suite)}` };

/** A link of a served page; in a file, which has no other pages, the text alone. */
const link = (href, ...children) => (DATA.mark ? el("a", { href }, children) : el("span", {}, children));

/** "a, b and 3 more" */
const firstOf = (names, most = 5) => `${names.slice(0, most).join(", ")}${names.length > most ? ` and ${names.length - most} more` : ""}`;

/** A checkpoint by its label: its training step, or its folder's name. */
const stepOf = (label) => (/^\d+$/.test(label) ? `step ${label}` : label);

/** What all of these held. */
const slotOf = (rows) => (rows.every((r) => r.gpu_seconds === null || r.slot === "slot") && rows.some((r) => r.gpu_seconds !== null) ? "slot" : "GPU");

/** How a training stands: a line each clause, which leads to the comparison that it speaks of. */
const clausesOf = ({ clauses }) => clauses.map(({ text, verdict, compared }) =>
  el("div", { class: { worse: "trouble", better: "good" }[verdict] ?? "soft" }, compared.length ? link(address.compare(compared), said(text)) : said(text)));

/** What to type for an evaluation that does not stand well. `text`: how it stands, in words. */
function commandFor(id, word, text) {
  if (word === "stopped" && text.startsWith("stopped")) return command("evalspan daemon");
  if (text.startsWith("paused")) return command(`evalspan resume ${quoted(id)}`);
  return word === "failed" || word === "cancelled" || text.startsWith("given up") ? command(`evalspan retry ${quoted(id)}`) : null;
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

// Puts the parts of the page together: the heading, the list of parts, and each part when it is near the view.

if (DATA.kind === "comparison") PARTS.unshift({ id: "changes", name: "Changes", make: changesPart });

function changesPart() {
  const last = (r) => r.verdicts.at(-1);
  const columns = [{ name: "task", of: (r) => r.task }, { name: "measure", of: (r) => r.metric.replace(",none", "") },
    ...DATA.heads.map((head, i) => ({ name: head, of: (r) => r.values[i], show: (r) => `${score(r.values[i])}${r.stderrs[i] === null ? "" : ` ± ${score(r.stderrs[i])}`}${r.differs[i] ? "~" : ""}`, right: true })),
    { name: "change (95 %)", of: (r) => r.change, show: (r) => (r.change === null ? "–" : `${r.change >= 0 ? "+" : ""}${r.change.toFixed(4)}${"high" in last(r) ? ` ± ${score(last(r).high - last(r).difference)}` : ""}`), right: true },
    { name: "verdict", of: (r) => last(r).adjusted ?? 2, show: (r) => last(r).words }];
  const ids = el("ul", {}, DATA.ids.map((id, i) => el("li", {}, said(DATA.heads[i], "said strong"), ": ", said(id))));
  return section("changes", "Changes", `The last evaluation against the first. ${DATA.verdicts} "~": not comparable with the first.`, ids, table(columns, DATA.rows, { label: "changes" }), command(`evalspan compare ${DATA.ids.map(quoted).join(" ")}`));
}

function begin() {
  const parts = PARTS.map((part) => ({ ...part, holder: el("div", { class: "part", id: `part-${part.id}` }) }));
  const nav = el("nav", { "aria-label": "parts of the page" }, el("strong", { text: "evalspan" }), parts.map((p) => el("a", { href: `#part-${p.id}`, text: p.name })),
    el("button", { type: "button", text: "light / dark", onclick: otherTheme }));
  const main = el("main", { id: "main" }, el("h1", {}, said(document.title)), DATA.note ? el("p", { class: "note" }, said(DATA.note)) : null, parts.map((p) => p.holder));
  document.body.append(el("a", { class: "skip", href: "#main", text: "to the content" }), nav, main);
  for (const part of parts) part.holder.append(part.make());
  if (DATA.made_at) main.append(el("footer", { class: "note", text: `Made ${when(DATA.made_at)} by evalspan ${DATA.version ?? ""}. Nothing in this page was loaded from elsewhere.` }));
}

const DARK = matchMedia("(prefers-color-scheme: dark)");

function otherTheme() {
  const dark = document.documentElement.dataset.theme ?? (DARK.matches ? "dark" : "light");
  document.documentElement.dataset.theme = dark === "dark" ? "light" : "dark";
  try { localStorage.theme = document.documentElement.dataset.theme; } catch {} // refused: the theme is this page's alone
  recolour();
}

/** Canvases keep the colours that they were drawn with. */
function recolour() {
  for (const drawn of document.querySelectorAll(".plot, canvas")) drawn.redraw?.();
}

/** Paper is white and does not scroll: what is printed is drawn whole, in light colours, with the logs of failures. */
function printed() {
  const { theme } = document.documentElement.dataset;
  const closed = document.querySelectorAll("#failures details:not([open])");
  const set = (printing, to) => {
    PRINTING = printing;
    if (to) document.documentElement.dataset.theme = to;
    else delete document.documentElement.dataset.theme;
    for (const log of closed) log.open = printing;
    recolour();
  };
  for (const waiting of document.querySelectorAll("[data-waits]")) waiting.drawNow?.();
  set(true, "light");
  addEventListener("afterprint", () => set(false, theme), { once: true });
}

function drawAgain() {
  document.querySelectorAll("nav, main, .skip").forEach((old) => old.remove());
  begin();
}

try { if (localStorage.theme) document.documentElement.dataset.theme = localStorage.theme; } catch {}
DARK.addEventListener("change", recolour);
addEventListener("beforeprint", printed);
begin();

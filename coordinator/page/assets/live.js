// Of a served page: asks for the data again when the server says that they have changed, and draws the page anew.

const LEAST_MS = 3000; // between two times that the page is drawn

function stayCurrent() {
  const state = el("span", { class: "note", role: "status" });
  const show = () => {
    document.querySelector("nav").insertBefore(state, document.querySelector("nav button"));
    document.querySelector("nav strong").replaceWith(el("a", { class: "strong", href: "/", text: "evalspan" }));
  };
  let [due, busy, used] = [false, false, false];
  // what a reader has opened, chosen or typed would be lost: the page then waits for a word
  for (const kind of ["input", "click", "focusin"]) addEventListener(kind, (event) => { used ||= event.target.closest?.("main") !== null; }, true);
  const again = async () => {
    if (busy) return;
    [busy, due, used] = [true, false, false];
    try {
      const answer = await fetch(location.href, { headers: { Accept: "application/json" } });
      if (!answer.ok) throw new Error(answer.status);
      renew(await answer.json());
      show();
      state.textContent = `as of ${new Date(DATA.made_at * 1000).toLocaleTimeString()}`;
    } catch {
      state.textContent = "the server does not answer";
    }
    setTimeout(() => { busy = false; if (due) news(); }, LEAST_MS);
  };
  const news = () => {
    due = true;
    if (used) state.replaceChildren(el("button", { type: "button", text: "show newer data", onclick: again }));
    else again();
  };
  show();
  const source = new EventSource(`/changes?of=${encodeURIComponent(location.pathname + location.search)}`);
  source.onmessage = news;
  source.onerror = () => { state.textContent = "the server does not answer"; };
  source.onopen = () => { state.textContent = "kept up to date"; };
}

function renew({ data, blocks }) {
  for (const key of Object.keys(DATA)) delete DATA[key];
  Object.assign(DATA, data);
  document.querySelectorAll("script[id^='block-']").forEach((old) => old.remove());
  for (const [name, text] of Object.entries(blocks)) document.body.append(el("script", { type: "application/gzip", id: `block-${name}`, text }));
  const at = scrollY;
  drawAgain();
  scrollTo(0, at);
}

stayCurrent();

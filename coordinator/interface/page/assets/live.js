// Of a served page: asks, while it is seen, for data that have changed, and draws the page anew.

const LOOK_MS = 2000; // between two questions to the server

function stayCurrent() {
  const state = el("span", { class: "note", role: "status" });
  const show = () => {
    document.querySelector("nav").insertBefore(state, document.querySelector("nav button"));
    document.querySelector("nav strong").replaceWith(el("a", { class: "strong", href: "/", text: "evalspan" }));
  };
  let [busy, used] = [false, false];
  // what a reader has opened, chosen or typed would be lost: the page then waits for a word
  for (const kind of ["input", "click", "focusin"]) addEventListener(kind, (event) => { used ||= event.target.closest?.("main") !== null; }, true);
  let newer = null; // what the server answered last, while the page waits for a word
  const again = () => {
    renew(newer);
    [used, newer] = [false, null];
    state.textContent = `as of ${when(DATA.made_at)}`;
  };
  const look = async () => {
    if (document.hidden || busy) return;
    busy = true;
    try {
      const answer = await fetch(location.href, { headers: { Accept: "application/json", "If-None-Match": (newer?.data ?? DATA).mark } });
      if (answer.ok) newer = await answer.json();
      else if (answer.status !== 304) throw new Error(answer.status);
      if (!newer) state.textContent ||= "read from its files";
      else if (used) state.replaceChildren(el("button", { type: "button", text: "show newer data", onclick: again }));
      else again();
    } catch {
      state.textContent = "the server does not answer";
    }
    busy = false;
  };
  show();
  addEventListener("drawn", show);
  setInterval(look, LOOK_MS);
  addEventListener("visibilitychange", look);
  look();
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

// A page that is served by `microclip watch` asks for a newer version of itself, and reloads when
// nobody is using it. The review remembers its place.
"use strict";
(() => {
  const EVERY = 3000; // milliseconds
  const IDLE = 5000; // without keys, clicks or scrolling
  const version = document.documentElement.dataset.version;
  const notice = document.getElementById("live");
  let used = performance.now();
  for (const name of ["keydown", "pointerdown", "wheel", "touchmove", "scroll"]) {
    addEventListener(name, () => { used = performance.now(); }, { passive: true });
  }

  function isBusy() {
    const playing = [...document.querySelectorAll("audio")].some((one) => !one.paused);
    const typing = document.activeElement?.matches("input, select");
    const free = dispatchEvent(new Event("microclip-may-reload", { cancelable: true }));
    return playing || typing || !free || performance.now() - used < IDLE;
  }

  function say(text, withButton = false) {
    notice.textContent = text;
    notice.hidden = !text;
    if (!withButton) return;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Show";
    button.onclick = () => location.reload();
    notice.append(" ", button);
  }

  let isNew = false;
  async function look() {
    try {
      const answer = await fetch("version", { cache: "no-store" });
      const found = await answer.json();
      if (found.version !== version) {
        if (!isBusy()) return location.reload();
        if (!isNew) say("There are new results.", true);
        isNew = true;
      } else {
        say(found.problem ? `Not renewed: ${found.problem}` : "");
      }
    } catch {
      say("microclip watch has stopped: this page is no longer renewed.");
    }
    setTimeout(look, EVERY);
  }
  setTimeout(look, EVERY);
})();

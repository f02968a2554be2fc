// Reviewing suspects: keep, relabel or drop, by keyboard, mouse or touch. Verdicts are saved in the
// browser and exported as files. Everything from data goes in as text or as a property, never as
// markup.
"use strict";
(() => {
  const AT_ONCE = 24; // suspects on a page of the list
  const DONE = { keep: "✓ keep", relabel: "→ relabel", drop: "✕ drop" };

  function make(tag, properties, ...children) {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children.filter((child) => child !== null && child !== ""));
    return made;
  }

  // ------------------------------------------------------------------------------------ storage

  // Reading or writing may throw: private windows, blocked cookies, a full disk.
  function load(name, where = "localStorage") {
    try {
      return JSON.parse(window[where].getItem(name) || "null");
    } catch {
      return null;
    }
  }

  function save(name, value, where = "localStorage") {
    try {
      window[where].setItem(name, JSON.stringify(value));
      return true;
    } catch {
      return false;
    }
  }

  function verdictsIn(saved) {
    const entries = saved && typeof saved.verdicts === "object" ? saved.verdicts : {};
    const sound = ([, one]) => one && Object.hasOwn(DONE, one.verdict) &&
      (one.verdict !== "relabel" || typeof one.label === "string");
    return new Map(Object.entries(entries || {}).filter(sound));
  }

  // ------------------------------------------------------------------------------------- export

  const isNumber = (text) => /^-?(0|[1-9]\d*)$/.test(text);

  // As in the library's CSV files: what a spreadsheet would run as a formula gets an apostrophe.
  function cell(text) {
    const safe = !isNumber(text) && /^'*[=+\-@\t\r]/.test(text) ? `'${text}` : text;
    return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  }

  const COLUMNS = ["id", "verdict", "label", "given_label", "suggested_label", "probability",
    "kind"];

  function asCsv(entries) {
    const lines = entries.map((one) => COLUMNS.map((name) => cell(one[name] ?? "")).join(","));
    return `${[COLUMNS.join(","), ...lines].join("\r\n")}\r\n`;
  }

  function asJson(entries, data) {
    const lines = entries.map((one) => {
      const { id, ...rest } = one;
      // by hand, since scripts round integers of more than 53 bits
      const start = `{"id": ${data.integerIds ? id : JSON.stringify(id)}`;
      return `${start}, ${JSON.stringify(rest).slice(1)}`;
    });
    const head = { format: "microclip-review", version: 1, run: data.run,
      ids: data.integerIds ? "integer" : "string" };
    return `${JSON.stringify(head).slice(0, -1)}, "reviews": [\n${lines.join(",\n")}\n]}\n`;
  }

  function download(text, name, type) {
    const address = URL.createObjectURL(new Blob([text], { type }));
    const link = make("a", { href: address, download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  }

  // ------------------------------------------------------------------------------------- review

  function percent(value) {
    if (value === undefined) return "unknown";
    if (value > 0.999 && value < 1) return "over 99.9 %";
    return `${(100 * value).toFixed(value < 0.99 ? 0 : 1)} %`;
  }

  class Review {
    constructor(root, data) {
      this.root = root;
      this.data = data;
      this.list = root.querySelector("ul");
      this.filters = [...root.querySelectorAll("[data-filter]")];
      this.verdicts = verdictsIn(load(data.storage));
      this.texts = new Map();
      this.at = 0; // place of the current suspect in `shown`
      this.shown = [];
      const values = Object.entries(data.labels);
      root.querySelector("datalist").append(
        ...values.map(([value, name]) => make("option", { value, label: name })));
      this.offer();
      this.listen();
      this.returnToPlace();
      this.filter();
      this.saved(save(data.storage, this.content()));
      root.hidden = false;
      root.nextElementSibling.classList.add("replaced");
    }

    content() {
      return { run: this.data.run, verdicts: Object.fromEntries(this.verdicts) };
    }

    name(label) {
      return label === undefined ? "unknown" : this.data.labels[label] ?? label;
    }

    // The choices of the filters, with how many suspects there are of each.
    offer() {
      const rows = this.data.rows;
      const fill = (name, pairs) => {
        const select = this.filters.find((one) => one.dataset.filter === name);
        select.append(...pairs.map(([value, text]) => make("option", { value, textContent: text })));
        select.closest("label").hidden = pairs.length < 2;
      };
      const count = (key) => {
        const found = new Map();
        rows.forEach((row) => found.set(row[key], (found.get(row[key]) || 0) + 1));
        found.delete(undefined);
        return [...found];
      };
      const flagged = rows.filter((row) => row.flagged).length;
      const kinds = count("kind").map(([kind, n]) => [`kind ${kind}`, `${kind} (${n})`]);
      const both = flagged && flagged < rows.length ? [["flagged", `flagged (${flagged})`]] : [];
      fill("kind", [...both, ["all", `all (${rows.length})`], ...(kinds.length > 1 ? kinds : [])]);
      const order = ([a], [b]) => a.localeCompare(b, undefined, { numeric: true });
      const given = count("given").sort(order);
      fill("given", [["all", "all"],
        ...given.map(([label, n]) => [`label ${label}`, `${this.name(label)} (${n})`])]);
    }

    wanted() {
      return Object.fromEntries(this.filters.map((one) => [one.dataset.filter, one.value]));
    }

    filter() {
      const { kind, given, probability, verdict, words } = this.wanted();
      const text = words.trim().toLowerCase();
      const before = this.shown[this.at];
      this.shown = this.data.rows.filter((row) =>
        (kind === "all" || (kind === "flagged" ? row.flagged : kind === `kind ${row.kind}`)) &&
        (given === "all" || given === `label ${row.given}`) &&
        (row.probability ?? 0) >= Number(probability) &&
        (!verdict || (this.verdicts.get(row.id)?.verdict ?? "none") === verdict) &&
        (!text || this.text(row).includes(text)));
      this.at = Math.max(0, this.shown.indexOf(before));
      this.render();
    }

    text(row) {
      if (!this.texts.has(row.id)) {
        const words = [row.id, this.name(row.given), this.name(row.suggested), row.kind,
          row.domain, row.text, row.evidence];
        this.texts.set(row.id, words.join(" ").toLowerCase());
      }
      return this.texts.get(row.id);
    }

    // ----------------------------------------------------------------------------- what is shown

    render() {
      const first = Math.floor(this.at / AT_ONCE) * AT_ONCE;
      const rows = this.shown.slice(first, first + AT_ONCE);
      this.list.replaceChildren(...rows.map((row, place) => this.tile(row, first + place)));
      this.root.querySelector("[data-empty]").hidden = rows.length > 0;
      this.page(first);
      this.count();
    }

    page(first) {
      const last = Math.min(first + AT_ONCE, this.shown.length);
      for (const pager of this.root.querySelectorAll("[data-pager]")) {
        pager.hidden = this.shown.length <= AT_ONCE;
        const turn = (text, to) => make("button", { type: "button", textContent: text,
          disabled: to < 0 || to >= this.shown.length, onclick: () => this.turn(to) });
        pager.replaceChildren(turn("Previous", first - AT_ONCE),
          make("span", { textContent: `${first + 1} to ${last} of ${this.shown.length}` }),
          turn("Next", first + AT_ONCE));
      }
    }

    turn(to) {
      this.at = to;
      this.render();
      this.focus();
    }

    tile(row, place) {
      const button = (verdict, key, text) => make("button", { type: "button",
        title: `Key ${key}`, onclick: () => this.press(place, verdict) },
        make("kbd", { textContent: key, ariaHidden: "true" }), ` ${text}`);
      const buttons = [button("keep", "1", "Keep")];
      if (row.suggested !== undefined) {
        buttons.push(button("suggested", "2", `Relabel ${this.name(row.suggested)}`));
      }
      buttons.push(button("drop", "3", "Drop"));
      const input = make("input", { type: "text", autocomplete: "off",
        value: row.suggested ?? "", placeholder: "new label" });
      input.setAttribute("list", `${this.root.id}-labels`);
      input.addEventListener("keydown", (event) => this.typed(event, place));
      const take = make("button", { type: "button", textContent: "Relabel",
        onclick: () => this.relabel(place) });
      const other = make("div", { className: "other", hidden: true },
        make("label", {}, "Label ", input), take);
      const choose = make("button", { type: "button", title: "Key e",
        onclick: () => this.choose(place) },
        make("kbd", { textContent: "e", ariaHidden: "true" }), " Other label");
      const tile = make("li", { className: "suspect", tabIndex: -1 },
        this.media(row), ...this.facts(row),
        make("div", { className: "verdict-given", role: "status" }),
        make("div", { className: "actions" }, ...buttons, choose), other,
        make("p", { className: "refused", hidden: true, role: "alert" }));
      tile.dataset.place = place;
      tile.addEventListener("focusin", () => this.select(place));
      this.mark(tile, row);
      return tile;
    }

    media(row) {
      const name = `Example ${row.name}, labeled ${this.name(row.given)}`;
      if (row.shows === "image") {
        return make("img", { src: row.uri, alt: name, className: row.pixelated ? "pixelated" : "" });
      }
      if (row.shows === "audio") {
        const sound = make("audio", { controls: true, preload: "none", src: row.uri });
        sound.setAttribute("aria-label", name);
        return sound;
      }
      if (row.shows === "text") {
        return make("div", { className: "text data", textContent: row.text, tabIndex: 0 });
      }
      return "";
    }

    facts(row) {
      const data = (text) => make("strong", { className: "data", textContent: text });
      const labels = make("p", { className: "labels" });
      if (row.given !== undefined) labels.append("given ", data(this.name(row.given)));
      if (row.suggested !== undefined) {
        labels.append(" → suggested ", data(this.name(row.suggested)));
      }
      const found = [labels,
        make("p", {}, data(percent(row.probability)), " ", make("span", { className: "kind",
          textContent: row.kind }))];
      if (row.truth !== undefined) {
        found.push(make("p", {}, "truth ", data(row.truth)));
      }
      found.push(make("p", { className: "evidence note data", textContent: row.evidence }));
      const place = row.domain === undefined ? "" : `, ${row.domain}`;
      found.push(make("p", { className: "note data", textContent: `id ${row.name}${place}` }));
      if (row.note !== undefined) {
        found.push(make("p", { className: "note data", textContent: row.note }));
      }
      return found;
    }

    mark(tile, row) {
      const given = this.verdicts.get(row.id);
      tile.dataset.verdict = given ? given.verdict : "";
      let text = given ? DONE[given.verdict] : "";
      if (given && given.verdict === "relabel") text += ` ${this.name(given.label)}`;
      tile.querySelector(".verdict-given").textContent = text;
      const isSuggested = given?.label === row.suggested;
      tile.querySelectorAll(".actions button").forEach((button) => {
        const key = button.title.slice(-1);
        const pressed = { 1: given?.verdict === "keep", 3: given?.verdict === "drop",
          2: given?.verdict === "relabel" && isSuggested,
          e: given?.verdict === "relabel" && !isSuggested }[key];
        button.setAttribute("aria-pressed", String(Boolean(pressed)));
      });
      if (given?.verdict === "relabel") tile.querySelector("input").value = given.label;
      const now = Number(tile.dataset.place) === this.at;
      tile.tabIndex = now ? 0 : -1;
      tile.setAttribute("aria-current", String(now));
    }

    count() {
      const given = this.shown.map((row) => this.verdicts.get(row.id)).filter(Boolean);
      const done = given.length;
      const each = Object.keys(DONE).map((verdict) =>
        [given.filter((one) => one.verdict === verdict).length, verdict]);
      const said = each.filter(([n]) => n).map((pair) => pair.join(" ")).join(", ");
      const all = this.verdicts.size;
      this.root.querySelector("[data-progress]").textContent =
        `${done} of ${this.shown.length} reviewed` + (said ? `: ${said}` : "") +
        (all > done ? ` (${all} in all)` : "");
      const bar = this.root.querySelector("progress");
      bar.max = Math.max(this.shown.length, 1);
      bar.value = done;
      this.root.querySelectorAll("[data-export], [data-reset]").forEach((button) => {
        button.disabled = !this.verdicts.size;
      });
    }

    saved(success) {
      const place = this.root.querySelector("[data-storage]");
      place.hidden = success;
      place.textContent = success ? "" : "This browser does not let the page save your verdicts: " +
        "export them before you close or reload it.";
      this.unsaved = !success;
    }

    // -------------------------------------------------------------------------------- what is done

    tileAt(place) {
      return this.list.querySelector(`[data-place="${place}"]`);
    }

    select(place) {
      if (place === this.at) return;
      const before = this.tileAt(this.at);
      this.at = place;
      for (const tile of [before, this.tileAt(place)]) {
        if (tile) this.mark(tile, this.shown[Number(tile.dataset.place)]);
      }
    }

    focus() {
      const tile = this.tileAt(this.at);
      if (!tile) return;
      tile.focus({ preventScroll: true });
      tile.scrollIntoView({ block: "nearest", behavior: "instant" });
    }

    move(to) {
      if (to < 0 || to >= this.shown.length) return;
      if (this.tileAt(to)) this.select(to);
      else {
        this.at = to;
        this.render();
      }
      this.focus();
    }

    // The same verdict a second time takes it back; a key moves on, a click does not.
    press(place, verdict, moveOn = false) {
      const row = this.shown[place];
      const one = verdict === "suggested" ? { verdict: "relabel", label: row.suggested } : { verdict };
      const before = this.verdicts.get(row.id);
      const same = before?.verdict === one.verdict && before?.label === one.label;
      this.give(place, same && !moveOn ? null : one);
      if (moveOn) this.move(place + 1);
    }

    give(place, verdict) {
      const row = this.shown[place];
      if (verdict) this.verdicts.set(row.id, verdict);
      else this.verdicts.delete(row.id);
      const tile = this.tileAt(place);
      tile.querySelector(".other").hidden = true;
      tile.querySelector(".refused").hidden = true;
      this.mark(tile, row);
      this.count();
      this.saved(save(this.data.storage, this.content()));
    }

    choose(place) {
      const other = this.tileAt(place).querySelector(".other");
      other.hidden = false;
      other.querySelector("input").focus({ preventScroll: true });
      other.querySelector("input").select();
      this.tileAt(place).scrollIntoView({ block: "nearest", behavior: "instant" });
    }

    relabel(place, moveOn = false) {
      const tile = this.tileAt(place);
      const typed = tile.querySelector("input").value.trim();
      const label = this.labelOf(typed);
      if (label === null) {
        const refused = tile.querySelector(".refused");
        const some = Object.values(this.data.labels).slice(0, 12).join(", ");
        refused.textContent = typed ? `“${typed.slice(0, 80)}” is not one of the labels: ${some}` +
          (Object.keys(this.data.labels).length > 12 ? ", …" : "") : "Type the new label.";
        refused.hidden = false;
        return;
      }
      this.give(place, { verdict: "relabel", label });
      if (moveOn && place + 1 < this.shown.length) this.move(place + 1);
      else tile.focus();
    }

    // A label may be typed as it is exported, or by its name; null: there is no such label.
    labelOf(typed) {
      if (!typed) return null;
      if (Object.hasOwn(this.data.labels, typed)) return typed;
      const named = Object.entries(this.data.labels).find(([value, name]) =>
        [name, name.replace(` (${value})`, "")].some((one) => one === typed));
      return named ? named[0] : this.data.fixedLabels ? null : typed;
    }

    typed(event, place) {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault();
      if (event.key === "Enter") this.relabel(place, true);
      else {
        this.tileAt(place).querySelector(".other").hidden = true;
        this.tileAt(place).querySelector(".refused").hidden = true;
        this.tileAt(place).focus();
      }
    }

    next() {
      const open = (place) => !this.verdicts.has(this.shown[place].id);
      const places = this.shown.map((_, place) => (this.at + 1 + place) % this.shown.length);
      const found = places.find(open);
      if (found !== undefined) this.move(found);
    }

    // Returns whether the key means something here.
    key(key, inside) {
      const row = this.shown[this.at];
      if (!row) return false;
      const current = inside && this.list.contains(document.activeElement);
      if (["j", "k", "n"].includes(key) && !current && this.tileAt(this.at)) this.focus();
      else if (key === "j" || (current && key === "ArrowRight")) this.move(this.at + 1);
      else if (key === "k" || (current && key === "ArrowLeft")) this.move(this.at - 1);
      else if (key === "n") this.next();
      else if (!current) return false;
      else if (key === "1") this.press(this.at, "keep", true);
      else if (key === "2" && row.suggested !== undefined) this.press(this.at, "suggested", true);
      else if (key === "2" || key === "e") this.choose(this.at);
      else if (key === "3") this.press(this.at, "drop", true);
      else if (key === "0") this.give(this.at, null);
      else return false;
      return true;
    }

    entries() {
      const rows = new Map(this.data.rows.map((row) => [row.id, row]));
      const listed = this.data.rows.map((row) => row.id).filter((id) => this.verdicts.has(id));
      const others = [...this.verdicts.keys()].filter((id) => !rows.has(id));
      return [...listed, ...others].map((id) => {
        const { verdict, label } = this.verdicts.get(id);
        const row = rows.get(id) || {};
        return { id, verdict, label, given_label: row.given, suggested_label: row.suggested,
          probability: row.probability?.toString(), kind: row.kind };
      });
    }

    listen() {
      this.filters.forEach((one) => one.addEventListener("input", () => this.filter()));
      const stem = this.data.run.replace(/[^A-Za-z0-9_-]+/g, "-").slice(0, 60) || "run";
      this.root.querySelector("[data-export=csv]").onclick = () =>
        download(asCsv(this.entries()), `review-${stem}.csv`, "text/csv");
      this.root.querySelector("[data-export=json]").onclick = () =>
        download(asJson(this.entries(), this.data), `review-${stem}.json`, "application/json");
      const reset = this.root.querySelector("[data-reset]");
      const text = reset.textContent;
      reset.onblur = () => { reset.textContent = text; };
      reset.onclick = () => {
        if (reset.textContent === text) {
          reset.textContent = `Clear ${this.verdicts.size}? Click again`;
          return;
        }
        reset.textContent = text;
        this.verdicts.clear();
        this.saved(save(this.data.storage, this.content()));
        this.render();
      };
      addEventListener("storage", (event) => { // another tab
        if (event.key !== this.data.storage) return;
        this.verdicts = verdictsIn(load(this.data.storage));
        this.render();
      });
      addEventListener("beforeunload", (event) => {
        if (this.unsaved && this.verdicts.size) event.preventDefault();
      });
      addEventListener("pagehide", () => save(`${this.data.storage}-place`, {
        filters: this.wanted(), id: this.shown[this.at]?.id }, "sessionStorage"));
    }

    // After a reload: the same filters, the same suspect.
    returnToPlace() {
      const place = load(`${this.data.storage}-place`, "sessionStorage");
      if (!place || typeof place.filters !== "object") return;
      for (const filter of this.filters) {
        const value = place.filters[filter.dataset.filter];
        const isThere = !filter.options || [...filter.options].some((one) => one.value === value);
        if (typeof value === "string" && isThere) filter.value = value;
      }
      this.shown = this.data.rows.filter((row) => row.id === place.id);
    }
  }

  const all = JSON.parse(document.getElementById("reviews").textContent);
  const reviews = [...document.querySelectorAll("[data-review]")].map((root) =>
    new Review(root, all[root.dataset.review]));

  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.target.matches?.("input, select, textarea, audio")) return;
    const own = reviews.find((one) => one.root.contains(event.target));
    const free = event.target === document.body;
    const review = own || (free ? reviews[0] : undefined);
    if (review && review.key(event.key, Boolean(own))) event.preventDefault();
  });
  // For a page that reloads itself: not while something would be lost.
  addEventListener("microclip-may-reload", (event) => {
    if (reviews.some((one) => one.unsaved && one.verdicts.size)) event.preventDefault();
  });
})();

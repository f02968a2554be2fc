// The interactive parts of the page: figures, themes, sorting, filtering. No network access.
"use strict";
(() => {
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const quiet = { displayModeBar: false, responsive: true, showTips: false };

  // ------------------------------------------------------------------------------------ figures

  const named = /^var\((--[a-z0-9-]+)\)$/;

  function colored(value, style) {
    if (typeof value === "string") {
      const found = named.exec(value);
      return found ? style.getPropertyValue(found[1]).trim() : value;
    }
    if (Array.isArray(value)) return value.map((one) => colored(one, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, colored(v, style)]));
  }

  function laidOut(layout, style) {
    const ink = style.getPropertyValue("--ink").trim();
    const line = style.getPropertyValue("--line").trim();
    const axis = { gridcolor: line, linecolor: line, zeroline: false, fixedrange: true,
      automargin: true, tickfont: { size: 12 } };
    const base = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
      font: { family: "system-ui, sans-serif", size: 13, color: ink },
      margin: { l: 54, r: 10, t: 8, b: 44 }, dragmode: false,
      // one label for all lines at a step, except where there is one value per name
      hovermode: layout.xaxis && layout.xaxis.type === "category" ? "closest" : "x unified",
      hoverlabel: { bgcolor: style.getPropertyValue("--raised").trim(), font: { color: ink } },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", itemclick: "toggle" },
    };
    const result = { ...base, ...colored(layout, style) };
    result.legend = { ...base.legend, ...layout.legend };
    for (const name of Object.keys({ xaxis: 0, yaxis: 0, ...layout })) {
      if (/^[xy]axis\d*$/.test(name)) result[name] = { ...axis, ...result[name] };
    }
    result.xaxis = { ...result.xaxis, showgrid: result.xaxis.type !== "category" && !layout.barmode };
    return result;
  }

  function draw(place) {
    const figure = figures[place.dataset.figure];
    const select = document.querySelector(`select[data-for="${place.dataset.figure}"]`);
    const chosen = figure[select ? Number(select.value) : 0];
    const style = getComputedStyle(root);
    return Plotly.react(place, colored(chosen.data, style), laidOut(chosen.layout, style), quiet);
  }

  const plots = [...document.querySelectorAll("[data-figure]")];
  const drawAll = () => plots.forEach(draw);
  for (const select of document.querySelectorAll("select[data-for]")) {
    select.addEventListener("change", () =>
      plots.filter((place) => place.dataset.figure === select.dataset.for).forEach(draw));
  }

  // ------------------------------------------------------------------------------------- themes

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const toggle = document.getElementById("theme");

  function isDark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
  }

  function show(theme) {
    if (theme) root.dataset.theme = theme;
    toggle.textContent = isDark() ? "Light" : "Dark";
    toggle.setAttribute("aria-label", isDark() ? "Use light colors" : "Use dark colors");
    drawAll();
  }

  toggle.hidden = false;
  toggle.addEventListener("click", () => show(isDark() ? "light" : "dark"));
  dark.addEventListener("change", () => show());
  let before = null; // the theme to restore after printing; the event may fire twice
  addEventListener("beforeprint", () => {
    if (before === null) before = root.dataset.theme || "";
    show("light");
  });
  addEventListener("afterprint", () => {
    if (before === null) return;
    if (before === "") delete root.dataset.theme;
    show(before);
    before = null;
  });

  // ------------------------------------------------------------------------- sorting, filtering

  // numbers before texts, unknown values last in either direction
  function compare(one, other, sign) {
    if (one === "" || other === "") return (one === "") - (other === "");
    const [a, b] = [Number(one), Number(other)];
    if (!Number.isNaN(a) && !Number.isNaN(b)) return sign * (a - b);
    if (Number.isNaN(a) !== Number.isNaN(b)) return sign * (Number.isNaN(a) - Number.isNaN(b));
    return sign * one.localeCompare(other);
  }

  function reorder(parent, key, sign) {
    const rows = [...parent.children].map((row) => [key(row), row]);
    rows.sort((one, other) => compare(one[0], other[0], sign));
    parent.append(...rows.map((pair) => pair[1]));
  }

  for (const table of document.querySelectorAll("table[data-sortable]")) {
    const headings = [...table.tHead.rows[0].cells];
    headings.forEach((heading, column) => {
      heading.querySelector("button").addEventListener("click", () => {
        const up = heading.getAttribute("aria-sort") !== "ascending";
        headings.forEach((other) => other.setAttribute("aria-sort", "none"));
        heading.setAttribute("aria-sort", up ? "ascending" : "descending");
        reorder(table.tBodies[0], (row) => row.cells[column].dataset.sort, up ? 1 : -1);
      });
    });
  }

  for (const controls of document.querySelectorAll("[data-controls]")) {
    const target = document.getElementById(controls.dataset.controls);
    const items = [...target.children];
    const words = controls.querySelector("input");
    const choices = [...controls.querySelectorAll("select[data-choice]")];
    const order = controls.querySelector("select[data-order]");
    const count = controls.querySelector("[data-count]");
    const texts = new Map(items.map((item) => [item, item.textContent.toLowerCase()]));

    const more = document.querySelector(`[data-more="${controls.dataset.controls}"]`);
    let limit = Number(controls.dataset.atFirst || Infinity);

    function filter() {
      const wanted = words.value.trim().toLowerCase();
      let found = 0;
      for (const item of target.children) {
        const kept = texts.get(item).includes(wanted) && choices.every((choice) =>
          choice.selectedIndex === 0 || item.dataset[choice.dataset.choice] === choice.value);
        found += kept;
        item.hidden = !kept || found > limit;
      }
      count.textContent = `${found} of ${items.length}`;
      if (more) {
        more.hidden = found <= limit;
        more.textContent = `Show all ${found}`;
      }
    }

    function showAll() {
      limit = Infinity;
      filter();
    }

    if (more) more.addEventListener("click", showAll);
    addEventListener("beforeprint", showAll);
    words.addEventListener("input", filter);
    choices.forEach((choice) => choice.addEventListener("change", filter));
    if (order) {
      order.addEventListener("change", () => {
        const [name, direction] = order.value.split(" ");
        reorder(target, (item) => item.dataset[name], direction === "down" ? -1 : 1);
        filter();
      });
    }
    controls.hidden = false;
    filter();
  }

  // -------------------------------------------------------------------------------- finding one's way

  // tables that are wider than the screen say so
  const tables = [...document.querySelectorAll(".scroll")];
  const measure = () => tables.forEach((table) => {
    table.previousElementSibling.hidden = table.scrollWidth <= table.clientWidth + 1;
  });
  if (window.ResizeObserver) {
    const observer = new ResizeObserver(measure);
    tables.forEach((table) => observer.observe(table));
  }

  // the section that is being read is marked in the navigation
  const links = [...document.querySelectorAll("nav a")];
  const sections = links.map((link) => document.getElementById(link.hash.slice(1)));
  function locate() {
    const place = sections.findLastIndex((one) => one.getBoundingClientRect().top < 120);
    links.forEach((link, number) => {
      if ((number === place) === link.hasAttribute("aria-current")) return;
      if (number !== place) link.removeAttribute("aria-current");
      else {
        link.setAttribute("aria-current", "true");
        const list = link.closest("ul");
        list.scrollLeft += link.getBoundingClientRect().left - list.getBoundingClientRect().left - 40;
      }
    });
  }
  addEventListener("scroll", locate, { passive: true });
  locate();

  show();
  document.getElementById("no-figures").hidden = true;
})();

"use strict";
// Draws a run's page from its data, and draws it again when `tunerPage.show` gets newer data.

const tunerPage = (() => {
  const screenIsDark = matchMedia("screen and (prefers-color-scheme: dark)");
  const charts = [...document.querySelectorAll(".chart")];
  const byId = (id) => document.getElementById(id);
  const packed = byId("page-sources");
  let data = null, onSource = packed && packedSources(packed.textContent.trim());

  const sources = sourceView((number) => onSource(number));
  const table = trialTable((number) => showCard(number));
  let brushed = null;
  const parallel = parallelView(byId("chart-parallel"), (numbers, best, trace) => {
    brushed = numbers;
    const words = best === null ? "" : `; the fastest is trial ${trace.customdata[best]}`;
    byId("brushed").textContent = numbers
      ? `${numbers.length} of ${trace.customdata.length} trials kept${words}` : "";
    byId("unbrush").disabled = byId("show-brushed").disabled = !numbers;
    if (!numbers) table.keepOnly(null);
  });
  byId("unbrush").addEventListener("click", () => parallel.clear());
  byId("show-brushed").addEventListener("click", () => {
    table.keepOnly(brushed);
    byId("all").scrollIntoView();
    byId("filter").focus({preventScroll: true});
  });

  // ---- charts: the reader's light or dark, black on white on paper
  function theme(isDark) {
    const [ink, line] = isDark ? ["#d7dce2", "#39414c"] : ["#24292f", "#dfe3e8"];
    const axis = {
      gridcolor: line, linecolor: line, zerolinecolor: line, automargin: true, title: {standoff: 14},
    };
    return {layout: {
      font: {family: "system-ui, sans-serif", size: 12, color: ink},
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      xaxis: axis, yaxis: axis, margin: {l: 70, r: 30, t: 40, b: 50},
      hoverlabel: {align: "left"},
    }};
  }
  const nameOf = (chart) => chart.id.replace("chart-", "");
  function draw(chart, isDark = screenIsDark.matches, width = null) {
    const figure = data?.charts[nameOf(chart)]?.figure;
    if (!figure || chart.closest("[hidden]")) return;
    const isFirst = !chart.dataset.drawn;
    chart.dataset.drawn = "yes";
    if (nameOf(chart) === "parallel") return parallel.draw(figure, isDark, width);
    for (const trace of figure.data) {
      if (trace.meta === "trials") trace.hovertext = trace.customdata.map(table.hoverOf);
      if (trace.meta === "spans") trace.hovertext = spanTexts(trace);
    }
    const layout = {...figure.layout, template: theme(isDark), uirevision: "kept"};
    if (width) layout.width = width;
    const config = {responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"]};
    Plotly.react(chart, figure.data, layout, config);
    if (isFirst) {
      chart.on("plotly_click", ({points}) => {
        if (!Number.isInteger(points[0].customdata)) return;
        chart.focus({preventScroll: true});
        showCard(points[0].customdata);
      });
    }
  }
  // A lane's points come in fours: where a span starts, its middle, where it ends, a gap.
  function spanTexts({name, x, customdata}) {
    const texts = [];
    for (let at = 0; at < x.length; at += 4) {
      const length = x[at + 2] - x[at];
      const words = length >= 1 ? `${length.toFixed(1)} s` : `${Number((1000 * length).toPrecision(3))} ms`;
      const text = `trial ${customdata[at]}: ${name}, ${words}`;
      texts.push(text, text, text, null);
    }
    return texts;
  }
  const redraw = (isDark, width) => charts.forEach((chart) => draw(chart, isDark, width));
  const inView = new Set(), figures = new Map();
  const whenSeen = new IntersectionObserver((entries) => {
    for (const {isIntersecting, target} of entries) {
      if (isIntersecting) inView.add(target); else inView.delete(target);
      if (isIntersecting && target.dataset.stale) {
        delete target.dataset.stale;
        draw(target);
      }
    }
  }, {rootMargin: "400px"});
  // What nobody has scrolled to yet is drawn when there is nothing else to do: printing and
  // searching find it.
  const whenIdle = globalThis.requestIdleCallback ?? ((work) => setTimeout(work, 200));
  let isWaiting = false;
  function drawLater() {
    if (isWaiting) return;
    isWaiting = true;
    whenIdle(() => {
      isWaiting = false;
      const next = charts.find((chart) => chart.dataset.stale && !chart.closest("[hidden]"));
      if (!next) return;
      delete next.dataset.stale;
      draw(next);
      drawLater();
    });
  }
  screenIsDark.addEventListener("change", () => redraw(screenIsDark.matches));
  addEventListener("beforeprint", () => { table.printing(true); redraw(false, 680); });
  addEventListener("afterprint", () => { table.printing(false); redraw(screenIsDark.matches); });

  for (const button of document.querySelectorAll("[data-shows]")) {
    button.addEventListener("click", () => {
      for (const other of button.parentElement.children) {
        const isShown = other === button, chart = byId("chart-" + other.dataset.shows);
        other.setAttribute("aria-pressed", String(isShown));
        chart.closest("figure").hidden = !isShown;
        if (isShown) draw(chart);
      }
    });
  }

  // ---- copying a command; the buttons come and go with the parts of the page
  document.addEventListener("click", async ({target}) => {
    const button = target.closest?.("[data-copy]");
    if (!button) return;
    try {
      await navigator.clipboard.writeText(button.dataset.copy);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(button.previousElementSibling);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });

  // ---- one trial
  const card = byId("card");
  let carded = null, cameFrom = null;
  function showCard(number) {
    carded = number;
    cameFrom ??= document.activeElement;
    byId("card-title").textContent = `Trial ${number}${number === data.winner ? ", the winner" : ""}`;
    byId("card-facts").replaceChildren(...table.factsOf(number).flatMap(([label, text]) => {
      const [term, fact] = [document.createElement("dt"), document.createElement("dd")];
      [term.textContent, fact.textContent] = [label, text];
      return [term, fact];
    }));
    byId("card-compare").hidden = data.winner === null || number === data.winner;
    card.hidden = false;
    card.focus({preventScroll: true});
    table.mark(number);
  }
  function closeCard() {
    card.hidden = true;
    table.mark(null);
    // The table draws its rows anew, so that a button of before may be gone.
    if (cameFrom?.isConnected && cameFrom !== document.body) cameFrom.focus({preventScroll: true});
    else table.focusOn(carded);
    cameFrom = null;
  }
  byId("card-close").addEventListener("click", closeCard);
  byId("card-compare").addEventListener("click", () => {
    closeCard();
    sources.compareWith(carded);
  });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !card.hidden) closeCard();
  });

  // ---- the parts that are text and tables: escaped where they were made
  function replacePart(name, html) {
    const part = document.querySelector(`[data-part="${name}"]`);
    if (!part || part.dataset.html === html) return;
    const open = new Map([...part.querySelectorAll("details")].map((d) => [d.dataset.key, d.open]));
    const tops = [...part.querySelectorAll("[tabindex]")].map((e) => [e.scrollTop, e.scrollLeft]);
    part.innerHTML = html;
    part.dataset.html = html;
    for (const details of part.querySelectorAll("details")) {
      if (open.has(details.dataset.key)) details.open = open.get(details.dataset.key);
    }
    [...part.querySelectorAll("[tabindex]")].forEach((element, i) => {
      if (tops[i]) [element.scrollTop, element.scrollLeft] = tops[i];
    });
  }

  // Newer data replaces what it names; figures that it does not name stay as they were.
  function show(newer) {
    data = {...newer, charts: {...data?.charts, ...newer.charts}};
    if (data.title) document.title = data.title;
    showParts(newer.parts);
    table.show(data);
    sources.show(data, table.byLatency());
    showCharts(newer.charts);
  }
  function showParts(parts) {
    for (const [name, html] of Object.entries(parts)) replacePart(name, html);
  }
  function showCharts(newer) {
    Object.assign(data.charts, newer);
    for (const chart of charts) {
      if (!newer[nameOf(chart)]) continue;
      const {label, caption, figure} = newer[nameOf(chart)];
      chart.hidden = !figure;
      // The room that it will take: what is drawn above must not push what is read below.
      if (figure) chart.style.minHeight = `${figure.layout.height}px`;
      chart.setAttribute("aria-label", `${label}. ${caption}`);
      chart.nextElementSibling.textContent = caption;
      if (figures.get(chart) === figure) continue;  // the very same as before, and drawn
      figures.set(chart, figure);
      chart.dataset.stale = "yes";
      if (inView.has(chart) && !chart.hidden) {
        delete chart.dataset.stale;
        draw(chart);
      }
      whenSeen.observe(chart);
    }
    drawLater();
  }

  const inline = byId("page-data");
  if (inline) show({parts: {}, ...JSON.parse(inline.textContent)});
  return {
    show,
    showParts,
    showCharts,
    // How a live page gets a trial's source: `async (number) => lines or null`.
    set sourceOf(get) { onSource = get; },
  };
})();

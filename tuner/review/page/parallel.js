"use strict";
// Parallel coordinates with brushing, from the "parcoords" trace that Plotly's full bundle draws
// in a notebook: lines on a canvas, axes in SVG, so that it needs neither WebGL nor eval, prints,
// and every axis can be brushed with the keyboard.

function parallelView(box, tell) {
  const SVG = "http://www.w3.org/2000/svg", TOP = 46, BOTTOM = 16, SIDE = 56;
  const brushes = new Map();  // by the axis's label: [low, high] in the axis's own values
  let trace = null, axes = [], isDark = false, kept = null;

  box.classList.add("parallel");
  const canvas = document.createElement("canvas");
  const svg = document.createElementNS(SVG, "svg");
  canvas.setAttribute("aria-hidden", "true");
  box.append(canvas, svg);

  const plain = (text) =>  // labels are escaped for Plotly, which reads a little HTML
    String(text).replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");
  const element = (name, attributes, text) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const colourOf = (share) => {  // the trace's own scale: evenly spaced stops
    const stops = trace.line.colorscale.map(([, hex]) =>
      [1, 3, 5].map((at) => Number.parseInt(hex.slice(at, at + 2), 16)));
    const place = share * (stops.length - 1), low = Math.min(Math.floor(place), stops.length - 2);
    const mixed = stops[low].map((part, i) =>
      Math.round(part + (stops[low + 1][i] - part) * (place - low)));
    return `rgb(${mixed})`;
  };

  function layOut(width, height) {
    const dimensions = trace.dimensions, gap = (width - 2 * SIDE) / (dimensions.length - 1);
    axes = dimensions.map((dimension, index) => {
      const low = Math.min(...dimension.tickvals), high = Math.max(...dimension.tickvals);
      const span = high - low || 1, x = SIDE + index * gap;
      const toY = (value) => high === low ? (TOP + height - BOTTOM) / 2
        : height - BOTTOM - (value - low) / span * (height - TOP - BOTTOM);
      const toValue = (y) => low + (height - BOTTOM - y) / (height - TOP - BOTTOM) * span;
      const ticks = dimension.tickvals, half = ticks.length > 1 ? (ticks[1] - ticks[0]) / 2 : 0.5;
      return {
        label: plain(dimension.label), values: dimension.values, ticks, half, x, toY, toValue, gap,
        texts: dimension.ticktext.map(plain), isLast: index === dimensions.length - 1, index,
      };
    });
  }

  function chosen() {
    const all = trace.customdata.map((_, i) => i);
    const active = axes.filter((axis) => brushes.has(axis.label));
    if (!active.length) return null;
    return all.filter((i) => active.every((axis) => {
      const [low, high] = brushes.get(axis.label);
      return axis.values[i] >= low && axis.values[i] <= high;
    }));
  }

  function drawLines(width, height) {
    const scale = globalThis.devicePixelRatio || 1, pen = canvas.getContext("2d");
    canvas.width = width * scale;
    canvas.height = height * scale;
    pen.scale(scale, scale);
    const times = trace.line.color, least = Math.min(...times), most = Math.max(...times);
    const order = times.map((_, i) => i).sort((a, b) => times[b] - times[a]);
    const wanted = kept && new Set(kept);
    const line = (i) => {
      // Lines that share a value are spread by the golden ratio, which never bunches.
      const spread = ((trace.customdata[i] * 0.618034) % 1 - 0.5) * 14;
      pen.beginPath();
      for (const axis of axes) {
        const y = axis.toY(axis.values[i]) + (axis.isLast ? 0 : spread);
        if (axis.index) pen.lineTo(axis.x, y); else pen.moveTo(axis.x, y);
      }
      pen.stroke();
    };
    pen.lineWidth = 1;
    pen.strokeStyle = isDark ? "#5a6472" : "#c4cad1";
    pen.globalAlpha = 0.25;
    if (wanted) order.filter((i) => !wanted.has(i)).forEach(line);
    const drawn = wanted ? order.filter((i) => wanted.has(i)) : order;
    pen.globalAlpha = Math.max(0.12, Math.min(0.8, 60 / drawn.length));
    drawn.forEach((i, place) => {
      if (place === drawn.length - 1) [pen.globalAlpha, pen.lineWidth] = [1, 3];  // the fastest
      pen.strokeStyle = colourOf(most > least ? (times[i] - least) / (most - least) : 0);
      line(i);
    });
  }

  function words(axis) {
    const brush = brushes.get(axis.label);
    if (!brush) return "all values";
    const inside = axis.texts.filter((_, i) => axis.ticks[i] >= brush[0] && axis.ticks[i] <= brush[1]);
    return inside.length ? inside.join(", ") : "between two values";
  }

  function drawAxes() {
    const focused = svg.contains(document.activeElement) ? document.activeElement.dataset.label : null;
    svg.replaceChildren();
    for (const axis of axes) {
      const brush = brushes.get(axis.label), group = element("g", {
        class: "axis", tabindex: 0, role: "slider", "aria-orientation": "vertical",
        "aria-label": `${axis.label}: values kept`, "aria-valuemin": 0,
        "aria-valuemax": Math.max(1, axis.ticks.length - 1), "aria-valuetext": words(axis),
        "aria-valuenow": brush ? Math.max(0, axis.ticks.findIndex((v) => v >= brush[0])) : 0,
      });
      group.dataset.label = axis.label;
      const top = axis.toY(Math.max(...axis.ticks)), bottom = axis.toY(Math.min(...axis.ticks));
      group.append(element("line", {x1: axis.x, x2: axis.x, y1: top, y2: bottom}));
      const every = Math.ceil(axis.ticks.length / 14);
      axis.texts.forEach((text, i) => {
        if (i % every) return;
        const fits = Math.max(4, Math.floor(axis.gap / 7));
        group.append(element("text", {
          x: axis.x + (axis.isLast ? -6 : 6), y: axis.toY(axis.ticks[i]) + 4,
          "text-anchor": axis.isLast ? "end" : "start",
        }, text.length > fits ? text.slice(0, fits - 1) + "…" : text));
      });
      const most = Math.max(6, Math.floor(2 * axis.gap / 7.5));
      const name = axis.label.length > most ? axis.label.slice(0, most - 1) + "…" : axis.label;
      group.append(element("text", {
        class: "name", x: axis.x, y: axis.index % 2 ? 13 : 29, "text-anchor": "middle",
      }, name));
      const grip = element("rect", {
        class: "grip", x: axis.x - 18, width: 36, y: top - 10, height: bottom - top + 20, rx: 4,
      });
      if (brush) {
        const [from, to] = [axis.toY(brush[1]), axis.toY(brush[0])];
        group.append(element("rect", {
          class: "brush", x: axis.x - 8, width: 16, rx: 3,
          y: Math.max(from, top - 10), height: Math.max(4, Math.min(to, bottom + 10) - Math.max(from, top - 10)),
        }));
      }
      group.append(grip);
      listen(group, grip, axis);
      svg.append(group);
      if (axis.label === focused) group.focus({preventScroll: true});
    }
  }

  function brushed(label, range) {
    if (range) brushes.set(label, range); else brushes.delete(label);
    update();
  }
  function update() {
    kept = chosen();
    render();
    tell(kept && kept.map((i) => trace.customdata[i]), kept && kept.length
      ? kept.reduce((a, b) => (trace.line.color[b] < trace.line.color[a] ? b : a)) : null, trace);
  }

  function listen(group, grip, axis) {
    grip.addEventListener("pointerdown", (event) => {
      const startY = event.offsetY, rect = svg.getBoundingClientRect();
      event.preventDefault();
      group.focus({preventScroll: true});
      const move = (moved) => {
        const y = moved.clientY - rect.top;
        if (Math.abs(y - startY) < 4) return;
        const ends = [axis.toValue(startY), axis.toValue(y)].sort((a, b) => a - b);
        brushes.set(axis.label, ends);
        update();
      };
      const end = (last) => {
        removeEventListener("pointermove", move);
        removeEventListener("pointerup", end);
        if (Math.abs(last.clientY - rect.top - startY) < 4) brushed(axis.label, null);
      };
      addEventListener("pointermove", move);
      addEventListener("pointerup", end);
    });
    group.addEventListener("keydown", (event) => {
      const brush = brushes.get(axis.label), last = axis.ticks.length - 1;
      const at = brush ? axis.ticks.findIndex((v) => v >= brush[0]) : -1;
      const end = brush ? axis.ticks.findLastIndex((v) => v <= brush[1]) : -1;
      const step = {ArrowUp: 1, ArrowRight: 1, ArrowDown: -1, ArrowLeft: -1}[event.key];
      const around = (from, to) =>
        brushed(axis.label, [axis.ticks[from] - axis.half, axis.ticks[to] + axis.half]);
      if (event.key === "Escape" || event.key === "Delete") brushed(axis.label, null);
      else if (event.key === "Home") around(0, 0);
      else if (event.key === "End") around(last, last);
      else if (!step) return;
      else if (at < 0 || end < 0) around(step > 0 ? 0 : last, step > 0 ? 0 : last);
      else if (event.shiftKey) {
        around(step < 0 ? Math.max(0, at - 1) : at, step > 0 ? Math.min(last, end + 1) : end);
      } else {
        const next = Math.min(last, Math.max(0, at + step));
        around(next, next);
      }
      event.preventDefault();
    });
  }

  function render(width) {
    if (!trace) return;
    const height = box.clientHeight || 416, wide = width || box.clientWidth;
    if (!wide) return;
    svg.setAttribute("viewBox", `0 0 ${wide} ${height}`);
    layOut(wide, height);
    drawLines(wide, height);
    drawAxes();
  }

  new ResizeObserver(() => render()).observe(box);
  return {
    draw(figure, dark, width) {
      trace = figure.data[0];
      isDark = dark;
      render(width);
      if (brushes.size) update();
    },
    clear() {
      brushes.clear();
      update();
    },
  };
}

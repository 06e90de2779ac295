"use strict";
// The figures of a comparison: all runs on the same axes.

(() => {
  const sides = JSON.parse(document.getElementById("curves").textContent);
  const letter = (index) => String.fromCharCode(65 + index);
  const colours = ["#0072b2", "#d55e00", "#12875a", "#b0519c", "#8a7414", "#d03a4a"];
  const dashes = ["solid", "dash", "dot", "dashdot"];
  const dark = matchMedia("screen and (prefers-color-scheme: dark)");
  let [x, y] = ["numbers", "ratio"];

  function look() {
    const [ink, line] = dark.matches ? ["#d7dce2", "#39414c"] : ["#24292f", "#dfe3e8"];
    const axis = {gridcolor: line, linecolor: line, zerolinecolor: line, automargin: true};
    return {
      font: {family: "system-ui, sans-serif", size: 12, color: ink},
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      template: {layout: {xaxis: axis, yaxis: axis}}, margin: {l: 70, r: 30, t: 20, b: 50},
    };
  }
  const config = {responsive: true, displaylogo: false};
  function drawSpeedups() {
    const verified = sides.map((side, index) => ({...side, index})).filter((side) => side.low !== null);
    const traces = verified.map((s) => {
      const colour = colours[s.index % colours.length], y = [letter(s.index)];
      return {
        type: "scatter", mode: "markers", x: [s.speedup], y, marker: {size: 12, color: colour},
        error_x: {
          type: "data", symmetric: false, thickness: 3, width: 8, color: colour,
          array: [(s.high ?? s.speedup) - s.speedup], arrayminus: [s.speedup - s.low],
        },
        text: [`${y}: ${s.speedup.toFixed(3)}x`], hoverinfo: "text", showlegend: false,
      };
    });
    Plotly.react("chart-speedups", traces, {
      ...look(), height: 120 + 40 * sides.length,
      xaxis: {title: {text: "times PyTorch's speed"}, rangemode: "normal"},
      yaxis: {type: "category", categoryarray: sides.map((_, i) => letter(i)).reverse(), categoryorder: "array", range: [-0.7, sides.length - 0.3]},
      shapes: [{type: "line", x0: 1, x1: 1, yref: "paper", y0: 0, y1: 1, line: {dash: "dash", color: "#7a7f87"}}],
    }, config);
  }
  function drawSearch() {
    const traces = sides.map((side, index) => ({
      type: "scatter", mode: "lines+markers", name: letter(index),
      x: side.curve[x], y: side.curve[y],
      line: {shape: "hv", width: 2, color: colours[index % colours.length], dash: dashes[index % dashes.length]},
      marker: {size: 5},
    }));
    Plotly.react("chart-search", traces, {
      ...look(), height: 420, legend: {orientation: "h", y: 1.02, yanchor: "bottom"},
      xaxis: {title: {text: x === "numbers" ? "trial" : "seconds of working time"}},
      yaxis: {title: {text: y === "ratio" ? "times PyTorch's speed" : "latency in µs"}, type: y === "ratio" ? "linear" : "log"},
    }, config);
  }
  for (const button of document.querySelectorAll("[data-x], [data-y]")) {
    button.addEventListener("click", () => {
      if (button.dataset.x) x = button.dataset.x; else y = button.dataset.y;
      for (const other of button.parentElement.children) other.setAttribute("aria-pressed", String(other === button));
      drawSearch();
    });
  }
  const draw = () => { drawSpeedups(); drawSearch(); };
  dark.addEventListener("change", draw);
  draw();
})();

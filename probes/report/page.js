"use strict";
const form = document.getElementById("filters"), rows = [...document.querySelectorAll(".checks tbody tr")];
const names = ["status", "probe", "layer", "point", "text"];

function apply() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const name of names) if (document.activeElement !== form.elements[name] || name !== "text")
    form.elements[name].value = wanted.get(name) || "";
  const [status, probe, layer, point, text] = names.map(name => wanted.get(name) || "");
  let shown = 0;
  for (const row of rows) {
    const fits = (!status || (status === "open" ? row.className !== "PASS" : row.className === status))
      && (!probe || row.dataset.p === probe) && (!layer || row.dataset.l === layer)
      && (!point || row.dataset.c === point)
      && (!text || row.textContent.toLowerCase().includes(text.toLowerCase()));
    row.hidden = !fits;
    shown += fits;
  }
  form.querySelector("output").textContent = `${shown} of ${rows.length} checks`;
  return names.some(name => wanted.get(name));
}

form.addEventListener("input", () => {
  const wanted = new URLSearchParams();
  for (const name of names) if (form.elements[name].value) wanted.set(name, form.elements[name].value);
  history.replaceState(null, "", "#" + wanted);
  apply();
});
form.addEventListener("submit", event => event.preventDefault());
window.addEventListener("hashchange", () => { if (apply()) document.getElementById("checks").scrollIntoView(); });
apply();

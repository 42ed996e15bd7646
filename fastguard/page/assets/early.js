"use strict";
(() => {
  const root = document.documentElement;
  root.classList.add("js");
  try {
    const theme = localStorage.getItem("fastguard-theme");
    if (theme) root.dataset.theme = theme;
  } catch { /* a frame without storage */ }
})();

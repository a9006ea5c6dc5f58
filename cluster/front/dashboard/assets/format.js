// Numbers and times as a person reads them.

/** @param {number | null | undefined} s */
export function duration(s) {
  if (s === null || s === undefined || !Number.isFinite(s)) return "–";
  if (s < 0.0995) return `${(s * 1000).toFixed(s < 0.00995 ? 1 : 0)} ms`;
  if (s < 59.95) return `${s.toFixed(s < 9.95 ? 2 : 1)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
  return `${Math.floor(s / 3600)} h ${Math.round((s % 3600) / 60)} min`;
}

/** @param {number} n */
export function count(n) {
  if (!Number.isFinite(n)) return "–";
  if (Math.abs(n) < 10_000) return Number.isInteger(n) ? String(n) : n.toFixed(Math.abs(n) < 10 ? 1 : 0);
  const units = ["k", "M", "G", "T"];
  let unit = -1;
  for (; Math.abs(n) >= 1000 && unit < units.length - 1; unit++) n /= 1000;
  return `${n.toFixed(n < 100 ? 1 : 0)} ${units[unit]}`;
}

/** @param {number} n */
export function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; n >= 1000 && unit < units.length - 1; unit++) n /= 1000;
  return `${unit && n < 100 ? n.toFixed(1) : Math.round(n)} ${units[unit]}`;
}

/** @param {number | null} part of 1 */
export function percent(part) {
  return part === null || !Number.isFinite(part) ? "–" : `${Math.round(part * 100)} %`;
}

/** Time of day, `age_s` ago. @param {number} age_s */
export function clockTime(age_s) {
  return new Date(Date.now() - age_s * 1000).toLocaleTimeString([], { hour12: false });
}

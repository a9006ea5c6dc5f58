// Light or dark: as the system says, until a person chooses.

const KEY = "diptych.theme";
const CHOICES = ["system", "light", "dark"];

export class Theme {
  /** @param {HTMLElement} button @param {() => void} onChange */
  constructor(button, onChange) {
    this.button = button;
    this.onChange = onChange;
    this.set(localStorage.getItem(KEY) ?? "system");
    button.addEventListener("click", () => {
      const next = CHOICES[(CHOICES.indexOf(this.choice) + 1) % CHOICES.length];
      localStorage.setItem(KEY, next);
      this.set(next);
      onChange();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", onChange);
  }

  /** @param {string} choice */
  set(choice) {
    this.choice = CHOICES.includes(choice) ? choice : "system";
    document.documentElement.dataset.theme = this.choice;
    this.button.textContent = `Theme: ${this.choice}`;
  }
}

// Sequences of tokens, coloured by a figure of each: blue above the middle, orange below. Figures on hover.
const FIGURES = {
  ratio: { name: "ratio", of: (s, i) => Math.exp(s.logprob[i] - s.sampler[i]), middle: 1, width: 0.25,
           there: (s, i) => s.logprob[i] !== null && s.sampler[i] !== null },
  difference: { name: "trainer − sampler", of: (s, i) => s.logprob[i] - s.sampler[i], middle: 0, width: 0.5,
                there: (s, i) => s.logprob[i] !== null && s.sampler[i] !== null },
  advantage: { name: "advantage", of: (s, i) => s.advantage[i], middle: 0, there: (s, i) => s.advantage[i] !== null },
  logprob: { name: "log-probability", of: (s, i) => s.logprob[i], middle: 0, width: 6, there: (s, i) => s.logprob[i] !== null },
  mask: { name: "scored", of: (s, i) => (s.scored[i] ? 1 : 0), middle: 0, width: 2, there: (s, i) => s.scored[i] },
};
const shown = (value, digits = 4) => (value === null ? "–" : Number(value).toPrecision(digits));

export default {
  template: `
    <div class="gw-sequences">
      <section v-for="(s, n) in sequences" :key="n" class="gw-sequence" :aria-label="s.label">
        <header><b>{{ s.label }}</b> <span class="quiet">{{ s.facts }}</span></header>
        <p class="gw-tokens" tabindex="0"><span v-for="(text, i) in s.texts" :key="i" :style="style(s, i)"
          :class="{unscored: !s.scored[i]}" :title="hint(s, i)">{{ text.replace(/\\n/g, '↵\\n') }}</span></p>
      </section>
    </div>`,
  props: { sequences: Array, by: String },
  computed: {
    width() { // of advantages the largest that is shown: their size depends on the loss
      const largest = () => Math.max(...this.sequences.flatMap((s) => s.advantage.map(Math.abs)), 1e-9);
      return FIGURES[this.by].width ?? largest();
    },
  },
  methods: {
    style(s, i) {
      const figure = FIGURES[this.by];
      if (!figure.there(s, i)) return null;
      const share = (figure.of(s, i) - figure.middle) / this.width;
      const strength = Math.round(Math.min(Math.abs(share), 1) * 45);
      return strength ? { background: `color-mix(in srgb, var(--${share > 0 ? "s1" : "s2"}) ${strength}%, transparent)` } : null;
    },
    hint(s, i) {
      const rows = [`token ${i}: ${JSON.stringify(s.texts[i])}, id ${s.ids[i]}`, s.scored[i] ? "scored" : "not scored"];
      if (s.logprob[i] !== null) rows.push(`log-probability of the trainer ${shown(s.logprob[i])}`);
      if (s.sampler[i] !== null) rows.push(`log-probability of the sampler ${shown(s.sampler[i])}`);
      if (FIGURES.ratio.there(s, i)) rows.push(`ratio ${shown(FIGURES.ratio.of(s, i))}`);
      if (s.advantage[i] !== null) rows.push(`advantage ${shown(s.advantage[i])}`);
      return rows.join("\n");
    },
  },
};

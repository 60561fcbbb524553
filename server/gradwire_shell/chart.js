// What all charts share: they follow their size and the theme, have its colours, and select a range by dragging.
// Their library is half of all scripts: the page is made without waiting for it, and shows until then what it began with.
// A tick of an axis: with an exponent where it is long, and without the digits that rounding left.
export const amount = (value) => {
  const size = Math.abs(value);
  if (size === 0 || (size >= 1e-4 && size < 1e9))
    return Number(value.toPrecision(9)).toLocaleString("en-US", { maximumFractionDigits: 12 });
  return Number(value.toPrecision(6)).toExponential();
};

export const chart = {
  template: `<div role="img" :aria-label="title"></div>`,
  props: { title: String },
  async mounted() {
    const before = document.querySelector(`.gw-before [data-of="${this.$el.id}"]`);
    if (before) this.$el.append(...before.childNodes);
    const { echarts } = await import("nicegui-echart");
    if (!this.$el.isConnected) return; // it has gone meanwhile
    this.$el.replaceChildren();
    this.echarts = echarts;
    this.chart = echarts.init(this.$el, null, { renderer: "canvas" });
    this.resized = new ResizeObserver(() => {
      const { clientWidth, clientHeight } = this.$el; // it also tells of the size that the chart began with
      if (clientWidth !== this.chart.getWidth() || clientHeight !== this.chart.getHeight()) this.chart.resize();
    });
    this.resized.observe(this.$el);
    this.dark = document.body.classList.contains("body--dark");
    this.themed = new MutationObserver(() => {
      const dark = document.body.classList.contains("body--dark");
      if (dark !== this.dark) this.draw(); // other classes come and go with menus
      this.dark = dark;
    });
    this.themed.observe(document.body, { attributes: true, attributeFilter: ["class"] });
    this.$el.addEventListener("pointerenter", () => { // not at first: it draws all once more
      this.chart.dispatchAction({ type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true });
    }, { once: true });
    this.ready();
    this.draw();
  },
  beforeUnmount() {
    this.resized?.disconnect();
    this.themed?.disconnect();
    this.chart?.dispose();
  },
  methods: {
    draw() {
      if (!this.chart) return;
      const style = getComputedStyle(document.body);
      const token = (name) => style.getPropertyValue(name).trim();
      const common = {
        animation: false,
        textStyle: { fontFamily: style.fontFamily },
        tooltip: { renderMode: "richText", confine: true, backgroundColor: token("--surface"), borderColor: token("--line"),
                   textStyle: { color: token("--text"), fontSize: 12 } },
        toolbox: { show: true, itemSize: 0, showTitle: false, iconStyle: { opacity: 0 },
                   emphasis: { iconStyle: { opacity: 0 } }, feature: { dataZoom: { yAxisIndex: "none" } } },
      };
      const own = this.options(token);
      this.chart.setOption({ ...common, ...own, tooltip: { ...common.tooltip, ...own.tooltip } },
                           { replaceMerge: ["series"] });
    },
  },
};

// Curves in the theme's colours: drag selects a range, a double click shows all again.
import { echarts } from "nicegui-echart";

export default {
  template: `<div role="img" :aria-label="title"></div>`,
  props: { series: Array, title: String, axis: String, time: Boolean, shared: String },
  mounted() {
    this.chart = echarts.init(this.$el, null, { renderer: "canvas" });
    if (this.shared) {
      this.chart.group = this.shared;
      echarts.connect(this.shared);
    }
    this.chart.on("datazoom", (event) => {
      const zoom = event.batch?.[0] ?? event;
      if (zoom.startValue === undefined) return; // not dragged
      this.$emit("range", [zoom.startValue, zoom.endValue]);
      this.chart.dispatchAction({ type: "dataZoom", start: 0, end: 100 }); // the points that come are of the range
    });
    this.chart.getZr().on("dblclick", () => this.$emit("range", null));
    this.resized = new ResizeObserver(() => this.chart.resize());
    this.resized.observe(this.$el);
    this.dark = document.body.classList.contains("body--dark");
    this.themed = new MutationObserver(() => {
      const dark = document.body.classList.contains("body--dark");
      if (dark !== this.dark) this.draw(); // other classes come and go with menus
      this.dark = dark;
    });
    this.themed.observe(document.body, { attributes: true, attributeFilter: ["class"] });
    this.draw();
  },
  beforeUnmount() {
    this.resized.disconnect();
    this.themed.disconnect();
    this.chart.dispose();
  },
  watch: { series() { this.draw(); }, axis() { this.draw(); } },
  methods: {
    draw() {
      const style = getComputedStyle(document.body);
      const token = (name) => style.getPropertyValue(name).trim();
      const quiet = token("--quiet"), line = token("--line"), edge = token("--edge");
      const axis = { axisLabel: { color: quiet, fontSize: 11, hideOverlap: true }, axisTick: { show: false },
                     axisLine: { lineStyle: { color: edge } } };
      this.chart.setOption({
        animation: false,
        textStyle: { fontFamily: style.fontFamily },
        grid: { left: 8, right: 14, top: 14, bottom: 8, containLabel: true },
        xAxis: { type: this.time ? "time" : "value", min: "dataMin", max: "dataMax", splitLine: { show: false }, ...axis },
        yAxis: { type: "value", scale: true, splitLine: { lineStyle: { color: line, width: 0.5 } }, ...axis,
                 axisLine: { show: false } },
        tooltip: { trigger: "axis", renderMode: "richText", confine: true, backgroundColor: token("--surface"),
                   borderColor: line, textStyle: { color: token("--text"), fontSize: 12 },
                   valueFormatter: (value) => (value === undefined ? "" : Number(value).toPrecision(5)) },
        toolbox: { show: true, itemSize: 0, showTitle: false, iconStyle: { opacity: 0 },
                   emphasis: { iconStyle: { opacity: 0 } }, feature: { dataZoom: { yAxisIndex: "none" } } },
        series: this.series.map((each) => ({
          type: "line", name: each.name, data: each.points, showSymbol: each.points.length < 30, symbolSize: 5,
          lineStyle: { width: each.faint ? 1 : 1.75, opacity: each.faint ? 0.28 : 1 }, sampling: false,
          itemStyle: { color: token(`--s${(each.colour % 8) + 1}`), opacity: each.faint ? 0.28 : 1 },
          silent: !!each.faint, tooltip: { show: !each.faint },
        })),
      }, { replaceMerge: ["series"] });
      this.chart.dispatchAction({ type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true });
    },
  },
};

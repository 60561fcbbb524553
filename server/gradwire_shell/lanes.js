// A timeline: one lane a run, a box a piece of work. Drag to zoom, wheel with Ctrl; a double click shows all.
import { echarts } from "nicegui-echart";

export default {
  template: `<div role="img" :aria-label="title"></div>`,
  props: { lanes: Array, boxes: Array, colours: Object, title: String },
  mounted() {
    this.chart = echarts.init(this.$el, null, { renderer: "canvas" });
    this.resized = new ResizeObserver(() => this.chart.resize());
    this.resized.observe(this.$el);
    this.dark = document.body.classList.contains("body--dark");
    this.themed = new MutationObserver(() => {
      const dark = document.body.classList.contains("body--dark");
      if (dark !== this.dark) this.draw(); // other classes come and go with menus
      this.dark = dark;
    });
    this.themed.observe(document.body, { attributes: true, attributeFilter: ["class"] });
    this.chart.getZr().on("dblclick", () => this.chart.dispatchAction({ type: "dataZoom", start: 0, end: 100 }));
    this.draw();
  },
  beforeUnmount() {
    this.resized.disconnect();
    this.themed.disconnect();
    this.chart.dispose();
  },
  watch: { boxes() { this.draw(); } },
  methods: {
    draw() {
      const style = getComputedStyle(document.body);
      const token = (name) => style.getPropertyValue(name).trim();
      const quiet = token("--quiet"), line = token("--line");
      const labels = { color: quiet, fontSize: 11, hideOverlap: true };
      this.chart.setOption({
        animation: false,
        textStyle: { fontFamily: style.fontFamily },
        grid: { left: 20, right: 32, top: 8, bottom: 8, containLabel: true },
        xAxis: { type: "time", min: "dataMin", max: "dataMax", axisLabel: labels, axisLine: { lineStyle: { color: line } },
                 splitLine: { show: true, lineStyle: { color: line, width: 0.5 } } },
        yAxis: { type: "category", data: this.lanes, inverse: true, axisTick: { show: false },
                 axisLabel: { ...labels, hideOverlap: false, width: 150, overflow: "truncate" }, axisLine: { show: false } },
        dataZoom: [{ type: "inside", filterMode: "weakFilter", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false }],
        toolbox: { show: true, itemSize: 0, showTitle: false, feature: { dataZoom: { yAxisIndex: "none" } } },
        tooltip: { renderMode: "richText", confine: true, backgroundColor: token("--surface"), borderColor: line,
                   textStyle: { color: token("--text"), fontSize: 12 }, formatter: (each) => each.value[4] },
        series: [{
          type: "custom", progressive: 0, encode: { x: [1, 2], y: 0 }, data: this.boxes,
          renderItem: (params, api) => {
            const from = api.coord([api.value(1), api.value(0)]), to = api.coord([api.value(2), api.value(0)]);
            const height = Math.min(api.size([0, 1])[1] * 0.7, 26), area = params.coordSys;
            const shape = echarts.graphic.clipRectByRect(
              { x: from[0], y: from[1] - height / 2, width: Math.max(to[0] - from[0], 1), height },
              { x: area.x, y: area.y, width: area.width, height: area.height });
            return shape && { type: "rect", shape, style: { fill: token(this.colours[this.boxes[params.dataIndex][3]] || "--s6") } };
          },
        }],
      }, { replaceMerge: ["series"] });
      this.chart.dispatchAction({ type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true });
    },
  },
};

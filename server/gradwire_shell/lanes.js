// A timeline: one lane a run, a box a piece of work. Drag to zoom, wheel with Ctrl; a double click shows all.
import { toRaw } from "vue";
import { chart } from "chart";

export default {
  mixins: [chart],
  props: { lanes: Array, boxes: Array, colours: Object },
  watch: { boxes() { this.draw(); } },
  methods: {
    ready() {
      this.chart.getZr().on("dblclick", () => this.chart.dispatchAction({ type: "dataZoom", start: 0, end: 100 }));
    },
    options(token) {
      const quiet = token("--quiet"), line = token("--line"), boxes = toRaw(this.boxes);
      const labels = { color: quiet, fontSize: 11, hideOverlap: true };
      return {
        grid: { left: 20, right: 32, top: 8, bottom: 8, containLabel: true },
        xAxis: { type: "time", min: "dataMin", max: "dataMax", axisLabel: labels, axisLine: { lineStyle: { color: line } },
                 splitLine: { show: true, lineStyle: { color: line, width: 0.5 } } },
        yAxis: { type: "category", data: this.lanes, inverse: true, axisTick: { show: false },
                 axisLabel: { ...labels, hideOverlap: false, width: 150, overflow: "truncate" }, axisLine: { show: false } },
        dataZoom: [{ type: "inside", filterMode: "weakFilter", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false }],
        tooltip: { formatter: (each) => each.value[4] },
        series: [{
          type: "custom", progressive: 0, encode: { x: [1, 2], y: 0 }, data: boxes,
          renderItem: (params, api) => {
            const from = api.coord([api.value(1), api.value(0)]), to = api.coord([api.value(2), api.value(0)]);
            const height = Math.min(api.size([0, 1])[1] * 0.7, 26), area = params.coordSys;
            const shape = this.echarts.graphic.clipRectByRect(
              { x: from[0], y: from[1] - height / 2, width: Math.max(to[0] - from[0], 1), height },
              { x: area.x, y: area.y, width: area.width, height: area.height });
            return shape && { type: "rect", shape, style: { fill: token(this.colours[boxes[params.dataIndex][3]] || "--s6") } };
          },
        }],
      };
    },
  },
};

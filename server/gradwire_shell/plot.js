// Curves in the theme's colours: drag selects a range, a double click shows all again.
import { toRaw } from "vue";
import { amount, chart } from "chart";

export default {
  mixins: [chart],
  props: { series: Array, axis: String, level: Array },
  watch: { series() { this.draw(); } },
  methods: {
    ready() {
      this.chart.on("datazoom", (event) => {
        const zoom = event.batch?.[0] ?? event;
        if (zoom.startValue === undefined) return; // not dragged
        this.$emit("range", [zoom.startValue, zoom.endValue]);
        this.chart.dispatchAction({ type: "dataZoom", start: 0, end: 100 }); // the points that come are of the range
      });
      this.chart.getZr().on("dblclick", () => this.$emit("range", null));
    },
    options(token) {
      const axis = { axisLabel: { color: token("--quiet"), fontSize: 11, hideOverlap: true }, axisTick: { show: false },
                     axisLine: { lineStyle: { color: token("--edge") } } };
      const time = this.axis === "time";
      const places = toRaw(this.series).flatMap((each) => [each.x[0], each.x.at(-1)]).filter((x) => x !== undefined);
      const lone = !time && places.length && places.every((x) => x === places[0]); // it has a tick
      return {
        grid: { left: 8, right: 14, top: 10, bottom: time ? 6 : 20, containLabel: true },
        xAxis: { type: time ? "time" : "value", splitLine: { show: false }, ...axis,
                 min: lone ? Math.max(places[0] - 1, 0) : "dataMin", max: lone ? places[0] + 1 : "dataMax",
                 minInterval: time ? 0 : 1, splitNumber: Math.max(2, Math.floor(this.$el.clientWidth / 90)),
                 name: time ? "" : this.axis, nameLocation: "middle", nameGap: 22,
                 nameTextStyle: { color: token("--quiet"), fontSize: 11 },
                 axisLabel: { ...axis.axisLabel, alignMaxLabel: "right", // or its end is cut off
                              formatter: time ? null : amount } },
        yAxis: { type: "value", scale: true, min: this.level?.[0] ?? null, max: this.level?.[1] ?? null,
                 interval: this.level ? (this.level[1] - this.level[0]) / 2 : null, // else its end collides with a tick
                 splitNumber: Math.max(2, Math.floor(this.$el.clientHeight / 45)),
                 splitLine: { lineStyle: { color: token("--line"), width: 0.5 } }, ...axis,
                 axisLabel: { ...axis.axisLabel, formatter: amount }, axisLine: { show: false } },
        tooltip: { trigger: "axis",
                   valueFormatter: (value) => (value === undefined ? "" : Number(value).toPrecision(5)) },
        series: toRaw(this.series).map((each) => ({ // raw: what is reactive is read ten times as slowly
          type: "line", name: each.name, data: each.x.map((x, i) => [x, each.y[i]]), showSymbol: each.x.length < 30, symbolSize: 5,
          lineStyle: { width: each.faint ? 1 : 1.75, opacity: each.faint ? 0.28 : 1 }, sampling: false,
          itemStyle: { color: token(`--s${(each.colour % 8) + 1}`), opacity: each.faint ? 0.28 : 1 },
          silent: !!each.faint, tooltip: { show: !each.faint },
        })),
      };
    },
  },
};

// A table of texts with search, order and keys: "/" searches, j and k move, Enter opens, x selects. Of a long one only
// the rows in the window are in the page. What is searched, its order and the selection are in the page's address.
const LONG = 60, SPARE = 4; // rows from which on those outside the window are left out, and how many beside it stay
const TERM = /^([^:<>=]+)(:|<=|>=|<|>)(.+)$/;
const name = (text) => text.toLowerCase().replace(/[ _]/g, "");
const one = (units) => units.replace(/ies$/, "y").replace(/ches$/, "ch").replace(/s$/, ""); // batches -> batch, entries -> entry

export default {
  template: `
    <div>
      <div class="gw-tools" v-if="searchable">
        <input class="gw-search" type="search" v-model="sought" ref="search" :aria-label="search" :placeholder="search"
               title="Words, or a column's name: state:idle, loss&lt;2" @keydown.escape="leave" @keydown.enter="first">
        <span class="quiet" role="status">{{ sought ? shown.length + ' of ' + rows.length : rows.length + ' ' + (rows.length === 1 ? one(unit) : unit) }}</span>
      </div>
      <div class="gw-table" tabindex="0" role="region" :aria-label="label">
        <table ref="table" :aria-rowcount="long ? shown.length + 1 : null">
          <thead><tr>
            <td v-if="selectable"></td>
            <th v-for="c in filled" :key="c.name" :class="{num: c.num}" :title="c.label.length > 30 ? c.label : null" scope="col"
                :aria-sort="order.slice(1) === c.label ? (order[0] === '-' ? 'descending' : 'ascending') : null">
              <button v-if="ordered(c)" class="gw-order" :title="c.hint || null" @click="turn(c)">{{ c.label
                }}<i v-if="order.slice(1) === c.label">{{ order[0] === '-' ? '↓' : '↑' }}</i></button>
              <abbr v-else-if="c.hint" :title="c.hint">{{ c.label }}</abbr><template v-else>{{ c.label }}</template>
            </th>
          </tr></thead>
          <tbody ref="body">
            <tr v-if="from" aria-hidden="true" :style="{height: from * height + 'px'}"></tr>
            <template v-for="(row, i) in within" :key="row.key">
            <tr v-if="row.members" class="group"><th :colspan="(selectable ? 1 : 0) + 1" scope="rowgroup">
                <button class="gw-order" :aria-expanded="!closed.includes(row.group)" @click="fold(row.group)">{{
                  closed.includes(row.group) ? '▸' : '▾' }} {{ row.group }}</button><span class="sub">{{ row.members.length }}</span></th>
              <td v-for="c in filled.slice(1)" :key="c.name" :class="{num: c.num}" :title="c.mean ? 'mean of the group' : null">{{ c.mean ? mean(row.members, c) : '' }}</td></tr>
            <tr v-else :class="{at: from + i === at}" :data-key="row.key">
              <td v-if="selectable"><input type="checkbox" :checked="chosen.includes(row.key)"
                  :aria-label="'select ' + row.key" @change="choose(row.key)"></td>
              <td v-for="c in filled" :key="c.name" :class="{num: c.num, wraps: c.wraps}" :title="row[c.name + '_hint'] || null">
                <a v-if="row.href && c.link" :href="row.href">{{ row[c.name] }}</a>
                <span v-else-if="c.state" :class="['gw-state', row[c.name]]">{{ row[c.name] }}</span>
                <svg v-else-if="c.curve && row[c.name]" class="gw-spark" viewBox="-2 -2 104 28" preserveAspectRatio="none" aria-hidden="true"><polyline :points="row[c.name]"/></svg>
                <template v-else>{{ row[c.name] }}</template>
                <span v-if="row[c.name + '_sub']" class="sub">{{ row[c.name + '_sub'] }}</span>
              </td>
            </tr>
            </template>
            <tr v-if="until < shown.length" aria-hidden="true" :style="{height: (shown.length - until) * height + 'px'}"></tr>
          </tbody>
        </table>
        <div v-if="!shown.length" class="gw-none">{{ sought ? 'Nothing matches “' + sought + '”. Escape clears.' : none }}</div>
      </div>
    </div>`,
  props: { columns: Array, given: Array, label: String, search: String, unit: String, none: String,
           searchable: Boolean, selectable: Boolean },
  data: () => ({ sought: "", at: -1, chosen: [], order: "", closed: [], newer: {}, height: 0, top: 0, bottom: LONG }),
  computed: {
    rows() {
      return this.given.map((row) => this.newer[row.key] ?? row);
    },
    filled() {
      return this.columns.filter((c) => !c.sparse || this.rows.some((row) => row[c.name] !== "" && row[c.name] != null));
    },
    shown() { // with a head before each group
      const tests = this.sought.toLowerCase().split(/\s+/).filter(Boolean).map((word) => this.test(word));
      const found = this.rows.filter((row) => tests.every((test) => test(row)));
      const column = this.columns.find((c) => c.label === this.order.slice(1));
      if (column) {
        const sign = this.order[0] === "-" ? -1 : 1;
        const value = (row) => row[column.name + "_sort"] ?? (column.num ? null : row[column.name]);
        found.sort((a, b) => {
          const [left, right] = [value(a), value(b)];
          if (left == null || right == null) return (left == null) - (right == null); // what has none comes last
          return sign * (typeof left === "number" ? left - right : String(left).localeCompare(right, undefined, { numeric: true }));
        });
      }
      if (!found.some((row) => row.group !== undefined)) return found;
      const groups = new Map();
      for (const row of found) groups.set(row.group, [...(groups.get(row.group) ?? []), row]);
      return [...groups].flatMap(([group, members]) =>
        [{ key: "group " + group, group, members }, ...(this.closed.includes(group) ? [] : members)]);
    },
    long() { return this.searchable && this.shown.length > LONG; },
    from() { return this.long ? Math.min(this.top, this.shown.length - 1) : 0; },
    until() { return this.long ? Math.min(this.bottom, this.shown.length) : this.shown.length; },
    within() { return this.shown.slice(this.from, this.until); },
  },
  watch: {
    given() { this.newer = {}; },
    sought() { this.keep("search", this.sought); },
    shown() { this.$nextTick(this.look); },
  },
  mounted() {
    if (!this.searchable) return;
    const asked = new URL(location).searchParams;
    this.sought = asked.get("search") ?? "";
    this.order = asked.get("order") ?? "";
    this.chosen = (asked.get("chosen") ?? "").split(",").filter(Boolean);
    if (this.chosen.length && this.selectable) this.$emit("chosen", this.chosen);
    document.addEventListener("keydown", this.key);
    addEventListener("scroll", this.look, { passive: true });
    addEventListener("resize", this.look);
    this.watching = new ResizeObserver(this.look); // of the page, once it is laid out: what stands above may come and go
    this.watching.observe(document.body);
  },
  unmounted() {
    document.removeEventListener("keydown", this.key);
    removeEventListener("scroll", this.look);
    removeEventListener("resize", this.look);
    this.watching?.disconnect();
  },
  methods: {
    one,
    patch(rows) { // those that have changed
      this.newer = { ...this.newer, ...Object.fromEntries(rows.map((row) => [row.key, row])) };
    },
    keep(what, value) {
      const address = new URL(location);
      if (value) address.searchParams.set(what, value);
      else address.searchParams.delete(what);
      history.replaceState(history.state, "", address);
    },
    look() { // which rows the window shows
      if (!this.long || !this.$refs.body) return;
      const row = this.$refs.body.querySelector("tr[data-key]");
      if (row) this.height = row.getBoundingClientRect().height;
      const above = -this.$refs.body.getBoundingClientRect().top / (this.height || 32);
      this.top = Math.max(Math.floor(above) - SPARE, 0);
      this.bottom = Math.ceil(above + innerHeight / (this.height || 32)) + SPARE;
    },
    test(word) {
      const term = TERM.exec(word), column = term && this.columns.find((c) => name(c.label) === name(term[1]));
      const has = (text) => (row) => text(row).toLowerCase().includes(column ? term[3] : word);
      if (!column) return has((row) => this.columns.map((c) => (c.curve ? "" : `${row[c.name] ?? ""} ${row[c.name + "_sub"] ?? ""} ${row[c.name + "_hint"] ?? ""}`)).join(" "));
      if (term[2] === ":") return has((row) => String(row[column.name] ?? ""));
      const limit = Number(term[3]);
      return (row) => {
        const value = row[column.name + "_sort"];
        if (value == null || Number.isNaN(limit)) return false;
        return { "<": value < limit, ">": value > limit, "<=": value <= limit, ">=": value >= limit }[term[2]];
      };
    },
    ordered(c) {
      return this.searchable && !c.curve && (!c.num || this.rows.some((row) => row[c.name + "_sort"] != null));
    },
    turn(c) { // of numbers the largest first, then the smallest, then as they came
      const both = c.num ? "-+" : "+-";
      const next = this.order.slice(1) !== c.label ? both[0] : this.order[0] === both[0] ? both[1] : "";
      this.order = next && next + c.label;
      this.keep("order", this.order);
    },
    fold(group) {
      this.closed = this.closed.includes(group) ? this.closed.filter((each) => each !== group) : [...this.closed, group];
    },
    mean(members, c) {
      const values = members.map((row) => row[c.name + "_sort"]).filter((value) => Number.isFinite(value));
      return values.length ? Number((values.reduce((a, b) => a + b) / values.length).toPrecision(4)).toString() : "";
    },
    leave() {
      this.sought = "";
      this.$refs.search.blur();
    },
    first() {
      this.$refs.search.blur();
      this.at = -1;
      this.move(1);
    },
    move(by) {
      let to = this.at + by;
      while (this.shown[to]?.members) to += by;
      if (this.shown[to]) this.at = to;
      if (this.long && !(this.at > this.from && this.at < this.until - 1)) {
        scrollBy(0, this.$refs.body.getBoundingClientRect().top + this.at * this.height - innerHeight / 2);
      }
    },
    choose(key) {
      this.chosen = this.chosen.includes(key) ? this.chosen.filter((each) => each !== key) : [...this.chosen, key];
      this.keep("chosen", this.chosen.join(","));
      this.$emit("chosen", this.chosen);
    },
    key(event) {
      const typing = event.target.closest("input, textarea, select, [contenteditable]");
      if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
      const row = this.shown[this.at];
      if (event.key === "/") this.$refs.search.focus();
      else if (event.key === "j") this.move(1);
      else if (event.key === "k") this.move(-1);
      else if (event.key === "Enter" && row?.href && event.target === document.body) location.href = row.href;
      else if (event.key === "x" && row && this.selectable) this.choose(row.key);
      else return;
      event.preventDefault();
      this.$nextTick(() => this.$el.querySelector("tr.at")?.scrollIntoView({ block: "nearest" }));
    },
  },
};

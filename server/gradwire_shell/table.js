// A table of texts with search and keys: "/" searches, j and k move, Enter opens, x selects.
export default {
  template: `
    <div>
      <div class="gw-tools" v-if="searchable">
        <input class="gw-search" type="search" v-model="sought" ref="search" :aria-label="search" :placeholder="search"
               @keydown.escape="leave" @keydown.enter="first">
        <span class="quiet" role="status">{{ sought ? shown.length + ' of ' + rows.length : rows.length + ' ' + (rows.length === 1 ? unit.replace(/s$/, '') : unit) }}</span>
      </div>
      <div class="gw-table" tabindex="0" role="region" :aria-label="label">
        <table>
          <thead><tr>
            <td v-if="selectable"></td>
            <th v-for="c in filled" :key="c.name" :class="{num: c.num}" :title="c.label.length > 30 ? c.label : null" scope="col">
              <abbr v-if="c.hint" :title="c.hint">{{ c.label }}</abbr><template v-else>{{ c.label }}</template>
            </th>
          </tr></thead>
          <tbody>
            <tr v-for="(row, i) in shown" :key="row.key" :class="{at: i === at}" :data-key="row.key">
              <td v-if="selectable"><input type="checkbox" :checked="chosen.includes(row.key)"
                  :aria-label="'select ' + row.key" @change="choose(row.key)"></td>
              <td v-for="c in filled" :key="c.name" :class="{num: c.num}" :title="row[c.name + '_hint'] || null">
                <a v-if="row.href && c.link" :href="row.href">{{ row[c.name] }}</a>
                <span v-else-if="c.state" :class="['gw-state', row[c.name]]">{{ row[c.name] }}</span>
                <template v-else>{{ row[c.name] }}</template>
                <span v-if="row[c.name + '_sub']" class="sub">{{ row[c.name + '_sub'] }}</span>
              </td>
            </tr>
          </tbody>
        </table>
        <div v-if="!shown.length" class="gw-none">{{ sought ? 'Nothing matches “' + sought + '”. Escape clears.' : none }}</div>
      </div>
    </div>`,
  props: { columns: Array, rows: Array, label: String, search: String, unit: String, none: String,
           searchable: Boolean, selectable: Boolean },
  data: () => ({ sought: "", at: -1, chosen: [] }),
  computed: {
    filled() {
      return this.columns.filter((c) => !c.sparse || this.rows.some((row) => row[c.name] !== "" && row[c.name] != null));
    },
    shown() {
      const words = this.sought.toLowerCase().split(/\s+/).filter(Boolean);
      return this.rows.filter((row) => {
        const text = Object.values(row).join(" ").toLowerCase();
        return words.every((word) => text.includes(word));
      });
    },
  },
  mounted() {
    if (this.searchable) document.addEventListener("keydown", this.key);
  },
  unmounted() {
    document.removeEventListener("keydown", this.key);
  },
  methods: {
    leave() {
      this.sought = "";
      this.$refs.search.blur();
    },
    first() {
      this.$refs.search.blur();
      this.at = 0;
    },
    choose(key) {
      this.chosen = this.chosen.includes(key) ? this.chosen.filter((each) => each !== key) : [...this.chosen, key];
      this.$emit("chosen", this.chosen);
    },
    key(event) {
      const typing = event.target.closest("input, textarea, select, [contenteditable]");
      if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
      const row = this.shown[this.at];
      if (event.key === "/") this.$refs.search.focus();
      else if (event.key === "j") this.at = Math.min(this.at + 1, this.shown.length - 1);
      else if (event.key === "k") this.at = Math.max(this.at - 1, 0);
      else if (event.key === "Enter" && row?.href && event.target === document.body) location.href = row.href;
      else if (event.key === "x" && row && this.selectable) this.choose(row.key);
      else return;
      event.preventDefault();
      this.$nextTick(() => this.$el.querySelector("tr.at")?.scrollIntoView({ block: "nearest" }));
    },
  },
};

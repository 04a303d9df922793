// The shopping cart of the web shop. Prices are in cents.

const SHIPPING_FREE_FROM = 5000;
const SHIPPING_COST = 490;

class Cart {
  constructor(storage = window.localStorage) {
    this.storage = storage;
    this.lines = new Map();
    this.listeners = new Set();
    this.restore();
  }

  add(product, count = 1) {
    const line = this.lines.get(product.id);
    if (line) {
      line.count += count;
    } else {
      this.lines.set(product.id, { product, count });
    }
    this.changed();
  }

  setCount(productId, count) {
    if (count <= 0) {
      this.lines.delete(productId);
    } else if (this.lines.has(productId)) {
      this.lines.get(productId).count = count;
    }
    this.changed();
  }

  clear() {
    this.lines.clear();
    this.changed();
  }

  get itemCount() {
    let count = 0;
    for (const line of this.lines.values()) {
      count += line.count;
    }
    return count;
  }

  get subtotal() {
    let cents = 0;
    for (const { product, count } of this.lines.values()) {
      cents += product.price * count;
    }
    return cents;
  }

  get shipping() {
    if (this.lines.size === 0 || this.subtotal >= SHIPPING_FREE_FROM) {
      return 0;
    }
    return SHIPPING_COST;
  }

  get total() {
    return this.subtotal + this.shipping;
  }

  subscribe(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  changed() {
    this.storage.setItem("cart", JSON.stringify([...this.lines.values()]));
    for (const listener of this.listeners) {
      listener(this);
    }
  }

  restore() {
    const saved = this.storage.getItem("cart");
    if (!saved) {
      return;
    }
    for (const line of JSON.parse(saved)) {
      this.lines.set(line.product.id, line);
    }
  }
}

function formatPrice(cents, currency = "EUR") {
  return new Intl.NumberFormat("en", { style: "currency", currency }).format(cents / 100);
}

module.exports = { Cart, formatPrice };

package shop.orders;

import java.math.BigDecimal;
import java.time.Clock;
import java.time.Instant;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.ConcurrentHashMap;

/** Creates orders and moves them through their states. */
public class OrderService {

    public enum State { CREATED, PAID, SHIPPED, CANCELLED }

    public record Line(String productId, int quantity, BigDecimal price) {}

    public static final class Order {
        private final String id;
        private final String customerId;
        private final List<Line> lines;
        private final Instant createdAt;
        private State state = State.CREATED;

        private Order(String id, String customerId, List<Line> lines, Instant createdAt) {
            this.id = id;
            this.customerId = customerId;
            this.lines = List.copyOf(lines);
            this.createdAt = createdAt;
        }

        public String id() { return id; }

        public State state() { return state; }

        public BigDecimal total() {
            return lines.stream()
                .map(line -> line.price().multiply(BigDecimal.valueOf(line.quantity())))
                .reduce(BigDecimal.ZERO, BigDecimal::add);
        }
    }

    private final Map<String, Order> orders = new ConcurrentHashMap<>();
    private final Clock clock;
    private int lastNumber = 0;

    public OrderService(Clock clock) {
        this.clock = clock;
    }

    public synchronized Order create(String customerId, List<Line> lines) {
        lastNumber++;
        String id = String.format("O-%06d", lastNumber);
        Order order = new Order(id, customerId, lines, clock.instant());
        orders.put(id, order);
        return order;
    }

    public Optional<Order> find(String id) {
        return Optional.ofNullable(orders.get(id));
    }

    public List<Order> ofCustomer(String customerId) {
        List<Order> found = new ArrayList<>();
        for (Order order : orders.values()) {
            if (order.customerId.equals(customerId)) {
                found.add(order);
            }
        }
        found.sort((a, b) -> b.createdAt.compareTo(a.createdAt));
        return found;
    }

    public void pay(String id) {
        move(id, State.CREATED, State.PAID);
    }

    public void ship(String id) {
        move(id, State.PAID, State.SHIPPED);
    }

    public void cancel(String id) {
        move(id, State.CREATED, State.CANCELLED);
    }

    private synchronized void move(String id, State from, State to) {
        Order order = find(id).orElseThrow(() -> new IllegalArgumentException("No order " + id));
        if (order.state != from) {
            throw new IllegalStateException("Order " + id + " is " + order.state + ", not " + from);
        }
        order.state = to;
    }
}

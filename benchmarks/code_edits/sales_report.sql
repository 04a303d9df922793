-- Monthly sales report for the regional managers, run on the first of each month.

WITH completed_orders AS (
    SELECT
        o.order_id,
        o.customer_id,
        o.region_id,
        o.ordered_at,
        SUM(i.quantity * i.unit_price) AS gross
    FROM orders AS o
    JOIN order_items AS i ON i.order_id = o.order_id
    WHERE o.status = 'completed'
      AND o.ordered_at >= DATE '2024-01-01'
    GROUP BY o.order_id, o.customer_id, o.region_id, o.ordered_at
),

refunded AS (
    SELECT
        r.order_id,
        SUM(r.amount) AS amount
    FROM refunds AS r
    GROUP BY r.order_id
),

net_orders AS (
    SELECT
        c.order_id,
        c.customer_id,
        c.region_id,
        DATE_TRUNC('month', c.ordered_at) AS month,
        c.gross - COALESCE(f.amount, 0) AS net
    FROM completed_orders AS c
    LEFT JOIN refunded AS f ON f.order_id = c.order_id
),

monthly AS (
    SELECT
        n.region_id,
        n.month,
        COUNT(*) AS order_count,
        COUNT(DISTINCT n.customer_id) AS customer_count,
        SUM(n.net) AS revenue
    FROM net_orders AS n
    GROUP BY n.region_id, n.month
)

SELECT
    g.name AS region,
    m.month,
    m.order_count,
    m.customer_count,
    m.revenue,
    m.revenue / m.order_count AS average_order,
    m.revenue - LAG(m.revenue) OVER (
        PARTITION BY m.region_id
        ORDER BY m.month
    ) AS change_to_last_month,
    RANK() OVER (
        PARTITION BY m.month
        ORDER BY m.revenue DESC
    ) AS rank_in_month
FROM monthly AS m
JOIN regions AS g ON g.region_id = m.region_id
ORDER BY m.month, rank_in_month;

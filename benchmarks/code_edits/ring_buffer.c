/* A ring buffer of bytes for the serial port driver. One writer, one reader. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct ring {
    uint8_t *data;
    size_t capacity;
    size_t head; /* next byte to read */
    size_t used;
};

struct ring *ring_new(size_t capacity)
{
    if (capacity == 0)
        return NULL;
    struct ring *ring = malloc(sizeof *ring);
    if (ring == NULL)
        return NULL;
    ring->data = malloc(capacity);
    if (ring->data == NULL) {
        free(ring);
        return NULL;
    }
    ring->capacity = capacity;
    ring->head = 0;
    ring->used = 0;
    return ring;
}

void ring_free(struct ring *ring)
{
    if (ring == NULL)
        return;
    free(ring->data);
    free(ring);
}

size_t ring_space(const struct ring *ring)
{
    return ring->capacity - ring->used;
}

bool ring_is_empty(const struct ring *ring)
{
    return ring->used == 0;
}

/* Copies as many bytes as fit and returns their number. */
size_t ring_write(struct ring *ring, const uint8_t *bytes, size_t count)
{
    size_t space = ring_space(ring);
    if (count > space)
        count = space;
    size_t tail = (ring->head + ring->used) % ring->capacity;
    size_t first = ring->capacity - tail;
    if (first > count)
        first = count;
    memcpy(ring->data + tail, bytes, first);
    memcpy(ring->data, bytes + first, count - first);
    ring->used += count;
    return count;
}

/* Takes at most count bytes out and returns how many there were. */
size_t ring_read(struct ring *ring, uint8_t *bytes, size_t count)
{
    if (count > ring->used)
        count = ring->used;
    size_t first = ring->capacity - ring->head;
    if (first > count)
        first = count;
    memcpy(bytes, ring->data + ring->head, first);
    memcpy(bytes + first, ring->data, count - first);
    ring->head = (ring->head + count) % ring->capacity;
    ring->used -= count;
    return count;
}

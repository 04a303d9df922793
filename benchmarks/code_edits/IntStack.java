package structures;

import java.util.Arrays;
import java.util.NoSuchElementException;

/**
 * A stack of ints that grows as needed.
 *
 * <p>Not safe for use by several threads.
 */
public final class IntStack {

    private static final int INITIAL_CAPACITY = 16;

    private int[] values;
    private int size;

    public IntStack() {
        this(INITIAL_CAPACITY);
    }

    public IntStack(int capacity) {
        if (capacity < 1) {
            throw new IllegalArgumentException("capacity is " + capacity);
        }
        values = new int[capacity];
    }

    public void push(int value) {
        if (size == values.length) {
            values = Arrays.copyOf(values, size * 2);
        }
        values[size++] = value;
    }

    public int pop() {
        if (size == 0) {
            throw new NoSuchElementException("the stack is empty");
        }
        return values[--size];
    }

    public int peek() {
        if (size == 0) {
            throw new NoSuchElementException("the stack is empty");
        }
        return values[size - 1];
    }

    public int size() {
        return size;
    }

    public boolean isEmpty() {
        return size == 0;
    }

    public void clear() {
        size = 0;
    }

    /** Exchanges the two values on top. */
    public void swap() {
        if (size < 2) {
            throw new NoSuchElementException("the stack holds fewer than two values");
        }
        int top = values[size - 1];
        values[size - 1] = values[size - 2];
        values[size - 2] = top;
    }

    /** Copies the top value. */
    public void duplicate() {
        push(peek());
    }

    /** The values from bottom to top. */
    public int[] toArray() {
        return Arrays.copyOf(values, size);
    }

    @Override
    public boolean equals(Object other) {
        return other instanceof IntStack that && Arrays.equals(toArray(), that.toArray());
    }

    @Override
    public int hashCode() {
        return Arrays.hashCode(toArray());
    }

    @Override
    public String toString() {
        return "IntStack" + Arrays.toString(toArray());
    }
}

// Package pool runs tasks on a fixed number of goroutines.
package pool

import (
	"errors"
	"fmt"
	"sync"
)

// ErrClosed is returned by Submit after Close.
var ErrClosed = errors.New("pool: closed")

// Task is one piece of work.
type Task func() error

// Pool hands tasks to its workers. The zero value is not usable, call New.
type Pool struct {
	tasks  chan Task
	wg     sync.WaitGroup
	mu     sync.Mutex
	closed bool
	errs   []error
}

// New starts a pool with the given number of workers.
func New(workers, queue int) (*Pool, error) {
	if workers < 1 {
		return nil, fmt.Errorf("pool: %d workers, need at least 1", workers)
	}
	p := &Pool{tasks: make(chan Task, queue)}
	for i := 0; i < workers; i++ {
		p.wg.Add(1)
		go p.work()
	}
	return p, nil
}

// Submit queues a task and blocks while the queue is full.
func (p *Pool) Submit(task Task) error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return ErrClosed
	}
	p.mu.Unlock()
	p.tasks <- task
	return nil
}

// Close waits for all queued tasks and returns their errors, joined.
func (p *Pool) Close() error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return ErrClosed
	}
	p.closed = true
	p.mu.Unlock()
	close(p.tasks)
	p.wg.Wait()
	return errors.Join(p.errs...)
}

func (p *Pool) work() {
	defer p.wg.Done()
	for task := range p.tasks {
		if err := p.run(task); err != nil {
			p.mu.Lock()
			p.errs = append(p.errs, err)
			p.mu.Unlock()
		}
	}
}

func (p *Pool) run(task Task) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("pool: task panicked: %v", r)
		}
	}()
	return task()
}

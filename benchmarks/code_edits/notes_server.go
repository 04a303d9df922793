// Command notes serves short notes over HTTP and keeps them in memory.
package main

import (
	"encoding/json"
	"log"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

type Note struct {
	ID      int       `json:"id"`
	Text    string    `json:"text"`
	Created time.Time `json:"created"`
}

type Store struct {
	mu     sync.RWMutex
	notes  map[int]Note
	nextID int
}

func NewStore() *Store {
	return &Store{notes: make(map[int]Note), nextID: 1}
}

func (s *Store) Add(text string) Note {
	s.mu.Lock()
	defer s.mu.Unlock()
	note := Note{ID: s.nextID, Text: text, Created: time.Now().UTC()}
	s.notes[note.ID] = note
	s.nextID++
	return note
}

func (s *Store) Get(id int) (Note, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	note, ok := s.notes[id]
	return note, ok
}

func writeJSON(w http.ResponseWriter, status int, value any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if err := json.NewEncoder(w).Encode(value); err != nil {
		log.Printf("write response: %v", err)
	}
}

func handleCreate(store *Store) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var input struct {
			Text string `json:"text"`
		}
		if err := json.NewDecoder(r.Body).Decode(&input); err != nil {
			http.Error(w, "the body is not JSON", http.StatusBadRequest)
			return
		}
		if strings.TrimSpace(input.Text) == "" {
			http.Error(w, "a note needs a text", http.StatusUnprocessableEntity)
			return
		}
		writeJSON(w, http.StatusCreated, store.Add(input.Text))
	}
}

func handleGet(store *Store) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		id, err := strconv.Atoi(r.PathValue("id"))
		if err != nil {
			http.Error(w, "the id is not a number", http.StatusBadRequest)
			return
		}
		note, ok := store.Get(id)
		if !ok {
			http.NotFound(w, r)
			return
		}
		writeJSON(w, http.StatusOK, note)
	}
}

func main() {
	addr := os.Getenv("NOTES_ADDR")
	if addr == "" {
		addr = ":8080"
	}
	store := NewStore()
	mux := http.NewServeMux()
	mux.HandleFunc("POST /notes", handleCreate(store))
	mux.HandleFunc("GET /notes/{id}", handleGet(store))
	log.Printf("listening on %s", addr)
	log.Fatal(http.ListenAndServe(addr, mux))
}

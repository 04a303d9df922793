// Command wordfreq prints the most frequent words of text files.
package main

import (
	"bufio"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"sort"
	"strings"
	"unicode"
)

type wordCount struct {
	word  string
	count int
}

func isSeparator(r rune) bool {
	return !unicode.IsLetter(r) && r != '\''
}

func countWords(r io.Reader, counts map[string]int, minLength int) {
	scanner := bufio.NewScanner(r)
	scanner.Buffer(make([]byte, 64*1024), 1024*1024)
	for scanner.Scan() {
		for _, word := range strings.FieldsFunc(scanner.Text(), isSeparator) {
			word = strings.Trim(strings.ToLower(word), "'")
			if len(word) >= minLength {
				counts[word]++
			}
		}
	}
	if err := scanner.Err(); err != nil {
		log.Fatalf("read: %v", err)
	}
}

func countFile(path string, counts map[string]int, minLength int) {
	file, err := os.Open(path)
	if err != nil {
		log.Fatalf("open: %v", err)
	}
	defer file.Close()
	countWords(file, counts, minLength)
}

func mostFrequent(counts map[string]int, limit int) []wordCount {
	list := make([]wordCount, 0, len(counts))
	for word, count := range counts {
		list = append(list, wordCount{word, count})
	}
	sort.Slice(list, func(i, j int) bool {
		if list[i].count != list[j].count {
			return list[i].count > list[j].count
		}
		return list[i].word < list[j].word
	})
	if len(list) > limit {
		list = list[:limit]
	}
	return list
}

func main() {
	limit := flag.Int("n", 10, "number of words to print")
	minLength := flag.Int("min", 1, "ignore words shorter than this")
	flag.Parse()

	counts := make(map[string]int)
	if flag.NArg() == 0 {
		countWords(os.Stdin, counts, *minLength)
	}
	for _, path := range flag.Args() {
		countFile(path, counts, *minLength)
	}
	for _, entry := range mostFrequent(counts, *limit) {
		fmt.Printf("%7d %s\n", entry.count, entry.word)
	}
}

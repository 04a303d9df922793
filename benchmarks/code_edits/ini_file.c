/* Reads "key = value" files into a linked list. Lines that begin with # are comments. */

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_LINE 512

struct entry {
    char *key;
    char *value;
    struct entry *next;
};

static char *copy_string(const char *text)
{
    size_t length = strlen(text) + 1;
    char *copy = malloc(length);
    memcpy(copy, text, length);
    return copy;
}

static char *trim(char *text)
{
    while (isspace((unsigned char)*text))
        text++;
    char *end = text + strlen(text);
    while (end > text && isspace((unsigned char)end[-1]))
        end--;
    *end = '\0';
    return text;
}

void ini_free(struct entry *list)
{
    while (list != NULL) {
        struct entry *next = list->next;
        free(list->key);
        free(list->value);
        free(list);
        list = next;
    }
}

static struct entry *new_entry(const char *key, const char *value)
{
    struct entry *entry = malloc(sizeof *entry);
    entry->key = copy_string(key);
    entry->value = copy_string(value);
    entry->next = NULL;
    return entry;
}

/* The entries of a file in their order, or NULL when it cannot be read. */
struct entry *ini_read(const char *path)
{
    FILE *file = fopen(path, "r");
    if (file == NULL) {
        perror(path);
        return NULL;
    }
    struct entry *first = NULL;
    struct entry **last = &first;
    char line[MAX_LINE];
    int number = 0;
    while (fgets(line, sizeof line, file) != NULL) {
        number++;
        char *text = trim(line);
        if (*text == '\0' || *text == '#')
            continue;
        char *sign = strchr(text, '=');
        if (sign == NULL) {
            fprintf(stderr, "%s:%d: no '=' in this line\n", path, number);
            continue;
        }
        *sign = '\0';
        *last = new_entry(trim(text), trim(sign + 1));
        last = &(*last)->next;
    }
    fclose(file);
    return first;
}

const char *ini_get(const struct entry *list, const char *key)
{
    for (; list != NULL; list = list->next)
        if (strcmp(list->key, key) == 0)
            return list->value;
    return NULL;
}

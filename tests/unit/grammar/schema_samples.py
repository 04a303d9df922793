"""Small random JSON schemas and values, and the texts of a value, one for each order of its properties."""

import itertools
import json
import random

NAMES = ("a", "b", "c")
TEXTS = ("", "a", "ab", "abc", "x-1", "b b", "1")
NUMBERS = (-3, -1, 0, 1, 2, 2.5, 6, 10)
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
PATTERNS = ("^a", "b$", "^[a-z]*$", "^(?=.*b)a", "^(?!ab)", "a(?!b)", "[a-z]b", r"\bab", "^ab?c?$", r"^\S+$")


class Samples:
    """Draws schemas and values; the same seed draws the same."""

    def __init__(self, seed):
        self.rng = random.Random(seed)

    def value(self, depth=2):
        kind = self.rng.choice(
            ("object", "array", "string", "number", "boolean", "null")[0 if depth else 2 :]
        )
        if kind == "object":
            names = self.rng.sample([*NAMES, "d"], self.rng.randint(0, 3))
            return {name: self.value(depth - 1) for name in names}
        if kind == "array":
            return [self.value(depth - 1) for _ in range(self.rng.randint(0, 3))]
        return {"string": self.rng.choice(TEXTS), "number": self.rng.choice(NUMBERS), "null": None}.get(
            kind, self.rng.random() < 0.5
        )

    def schema(self, depth=3):
        """A schema; its references lead to `$defs` that `root` adds."""
        if self.rng.random() < 0.08:
            return self.rng.random() < 0.6
        found = {}
        if self.rng.random() < 0.6:
            types = self.rng.sample(TYPES, self.rng.choice((1, 1, 1, 2, 3)))
            found["type"] = types[0] if len(types) == 1 else types
        keywords = list(self._keywords(depth))
        for name in self.rng.sample(keywords, self.rng.choice((0, 1, 1, 2, 2, 3))):
            found |= self._keyword(name, depth)
        return found

    def root(self):
        """A schema with definitions that it may refer to."""
        schema = self.schema()
        while isinstance(schema, bool):
            schema = self.schema()
        return {**schema, "$defs": {"d": self.schema(1), "e": self.schema(2)}}

    def _keywords(self, depth):
        yield from ("const", "enum", "minimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength")
        yield from ("pattern", "minItems", "maxItems", "uniqueItems", "required", "minProperties")
        yield from ("maxProperties", "dependentRequired", "not", "enum")
        if depth:
            yield from ("allOf", "anyOf", "oneOf", "oneOf", "if", "items", "prefixItems", "contains")
            yield from ("properties", "properties", "properties", "patternProperties", "additionalProperties")
            yield from ("propertyNames", "dependentSchemas", "$ref", "not", "unevaluatedProperties")

    def _keyword(self, name, depth):
        rng, below = self.rng, max(0, depth - 1)
        match name:
            case "const":
                return {"const": self.value(1)}
            case "enum":
                return {"enum": [self.value(1) for _ in range(rng.randint(1, 3))]}
            case "minimum" | "exclusiveMaximum":
                return {name: rng.choice(NUMBERS)}
            case "multipleOf":
                return {name: rng.choice((1, 2, 3, 0.5, 2.5))}
            case "minLength" | "minItems" | "minProperties":
                return {name: rng.randint(0, 2)}
            case "maxLength" | "maxItems" | "maxProperties":
                return {name: rng.randint(0, 3)}
            case "pattern":
                return {name: rng.choice(PATTERNS)}
            case "uniqueItems":
                return {name: rng.random() < 0.8}
            case "required":
                return {name: rng.sample(NAMES, rng.randint(0, 2))}
            case "dependentRequired":
                return {name: {rng.choice(NAMES): rng.sample(NAMES, rng.randint(0, 2))}}
            case "dependentSchemas":
                return {name: {rng.choice(NAMES): self.schema(below)}}
            case "allOf" | "anyOf" | "oneOf" | "prefixItems":
                return {name: [self.schema(below) for _ in range(rng.randint(1, 3))]}
            case "if":
                then = {key: self.schema(below) for key in ("then", "else") if rng.random() < 0.7}
                return {"if": self.schema(min(below, 1)), **then}
            case "contains":
                counts = {
                    key: rng.randint(0, 2) for key in ("minContains", "maxContains") if rng.random() < 0.2
                }
                return {"contains": self.schema(min(below, 1)), **counts}
            case "properties":
                return {name: {key: self.schema(below) for key in rng.sample(NAMES, rng.randint(1, 3))}}
            case "patternProperties":
                return {
                    name: {rng.choice(("^a", "b", "[bc]$", "^(?!a)")): self.schema(below) for _ in range(2)}
                }
            case "propertyNames":
                return {
                    name: rng.choice(
                        ({"enum": ["a", "b"]}, {"pattern": "^[ab]"}, {"maxLength": 1}, self.schema(0))
                    )
                }
            case "$ref":
                return {name: f"#/$defs/{rng.choice('de')}"}
            case "not":
                return {name: self.schema(min(below, 1))}
        return {name: self.schema(below)}


def texts_of(value):
    """The texts of a value, one for each order of the properties of its objects."""
    if isinstance(value, dict):
        for names in itertools.permutations(value):
            for inner in itertools.product(*(list(texts_of(value[name])) for name in names)):
                yield "{" + ",".join(f"{json.dumps(n)}:{t}" for n, t in zip(names, inner, strict=True)) + "}"
    elif isinstance(value, list):
        for inner in itertools.product(*(list(texts_of(one)) for one in value)):
            yield "[" + ",".join(inner) + "]"
    else:
        yield json.dumps(value)

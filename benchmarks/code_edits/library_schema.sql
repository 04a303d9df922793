-- Tables of the town library.

CREATE TABLE branches (
    branch_id   INTEGER PRIMARY KEY,
    name        VARCHAR(80) NOT NULL UNIQUE,
    street      VARCHAR(120) NOT NULL,
    opened_on   DATE
);

CREATE TABLE authors (
    author_id   INTEGER PRIMARY KEY,
    given_name  VARCHAR(60),
    family_name VARCHAR(60) NOT NULL,
    born        INTEGER
);

CREATE TABLE titles (
    title_id    INTEGER PRIMARY KEY,
    isbn        CHAR(13) UNIQUE,
    name        VARCHAR(200) NOT NULL,
    published   INTEGER,
    language    CHAR(2) NOT NULL DEFAULT 'en'
);

CREATE TABLE title_authors (
    title_id    INTEGER NOT NULL REFERENCES titles (title_id) ON DELETE CASCADE,
    author_id   INTEGER NOT NULL REFERENCES authors (author_id),
    position    INTEGER NOT NULL DEFAULT 1,
    PRIMARY KEY (title_id, author_id)
);

CREATE TABLE copies (
    copy_id     INTEGER PRIMARY KEY,
    title_id    INTEGER NOT NULL REFERENCES titles (title_id),
    branch_id   INTEGER NOT NULL REFERENCES branches (branch_id),
    shelf       VARCHAR(20) NOT NULL,
    bought_on   DATE NOT NULL,
    retired_on  DATE
);

CREATE TABLE members (
    member_id   INTEGER PRIMARY KEY,
    name        VARCHAR(120) NOT NULL,
    email       VARCHAR(200) NOT NULL UNIQUE,
    joined_on   DATE NOT NULL,
    blocked     BOOLEAN NOT NULL DEFAULT FALSE
);

CREATE TABLE loans (
    loan_id     INTEGER PRIMARY KEY,
    copy_id     INTEGER NOT NULL REFERENCES copies (copy_id),
    member_id   INTEGER NOT NULL REFERENCES members (member_id),
    lent_on     DATE NOT NULL,
    due_on      DATE NOT NULL,
    returned_on DATE,
    CHECK (due_on >= lent_on)
);

CREATE INDEX titles_by_name ON titles (name);
CREATE INDEX copies_by_title ON copies (title_id);
CREATE INDEX loans_by_member ON loans (member_id);

CREATE VIEW open_loans AS
SELECT l.loan_id, m.name AS member, t.name AS title, l.due_on
FROM loans l
JOIN members m ON m.member_id = l.member_id
JOIN copies c ON c.copy_id = l.copy_id
JOIN titles t ON t.title_id = c.title_id
WHERE l.returned_on IS NULL;

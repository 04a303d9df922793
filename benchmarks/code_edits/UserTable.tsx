import { useMemo, useState } from "react";

export interface User {
  id: string;
  name: string;
  email: string;
  role: "admin" | "editor" | "viewer";
  lastLogin: string | null;
}

type SortKey = "name" | "role" | "lastLogin";

interface Props {
  users: User[];
  pageSize?: number;
  onSelect: (user: User) => void;
}

function formatDate(value: string | null): string {
  return value === null ? "never" : new Date(value).toLocaleDateString();
}

export function UserTable({ users, pageSize = 20, onSelect }: Props) {
  const [sortKey, setSortKey] = useState<SortKey>("name");
  const [ascending, setAscending] = useState(true);
  const [page, setPage] = useState(0);

  const sorted = useMemo(() => {
    const factor = ascending ? 1 : -1;
    return [...users].sort(
      (a, b) => factor * (a[sortKey] ?? "").localeCompare(b[sortKey] ?? "")
    );
  }, [users, sortKey, ascending]);

  const pages = Math.max(1, Math.ceil(sorted.length / pageSize));
  const shown = sorted.slice(page * pageSize, (page + 1) * pageSize);

  function sortBy(key: SortKey) {
    if (key === sortKey) {
      setAscending(!ascending);
    } else {
      setSortKey(key);
      setAscending(true);
    }
    setPage(0);
  }

  return (
    <div className="user-table">
      <table>
        <thead>
          <tr>
            <th onClick={() => sortBy("name")}>Name</th>
            <th onClick={() => sortBy("role")}>Role</th>
            <th onClick={() => sortBy("lastLogin")}>Last login</th>
          </tr>
        </thead>
        <tbody>
          {shown.map((user) => (
            <tr key={user.id} onClick={() => onSelect(user)}>
              <td>{user.name}</td>
              <td>{user.role}</td>
              <td>{formatDate(user.lastLogin)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <div className="pager">
        <button disabled={page === 0} onClick={() => setPage(page - 1)}>
          Previous
        </button>
        <span>
          Page {page + 1} of {pages}
        </span>
        <button disabled={page + 1 >= pages} onClick={() => setPage(page + 1)}>
          Next
        </button>
      </div>
    </div>
  );
}

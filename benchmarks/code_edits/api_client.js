// Talks to the issue tracker. Every method returns a promise.

class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.name = "ApiError";
    this.status = status;
  }
}

class ApiClient {
  constructor(baseUrl, token) {
    this.baseUrl = baseUrl;
    this.token = token;
  }

  request(method, path, body) {
    const options = {
      method,
      headers: {
        Accept: "application/json",
        Authorization: `Bearer ${this.token}`,
      },
    };
    if (body !== undefined) {
      options.headers["Content-Type"] = "application/json";
      options.body = JSON.stringify(body);
    }
    return fetch(this.baseUrl + path, options).then((response) => {
      if (response.status === 204) {
        return null;
      }
      return response.json().then((data) => {
        if (!response.ok) {
          throw new ApiError(response.status, data.message || response.statusText);
        }
        return data;
      });
    });
  }

  listIssues(project, state = "open") {
    const query = new URLSearchParams({ state });
    return this.request("GET", `/projects/${project}/issues?${query}`);
  }

  createIssue(project, title, description) {
    return this.request("POST", `/projects/${project}/issues`, { title, description });
  }

  closeIssue(project, number, comment) {
    const path = `/projects/${project}/issues/${number}`;
    const commented = comment
      ? this.request("POST", `${path}/comments`, { text: comment })
      : Promise.resolve(null);
    return commented.then(() => this.request("PATCH", path, { state: "closed" }));
  }

  assign(project, number, user) {
    return this.request("PATCH", `/projects/${project}/issues/${number}`, { assignee: user });
  }

  counts(projects) {
    return Promise.all(
      projects.map((project) =>
        this.listIssues(project).then((issues) => [project, issues.length])
      )
    ).then((pairs) => Object.fromEntries(pairs));
  }
}

export { ApiClient, ApiError };

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
)

// serviceEvents returns the reasons of the Events about the Services of a namespace, by name and UID of the Service.
func (a *apiServer) serviceEvents(namespace string) map[string][]string {
	a.t.Helper()
	var list struct {
		Items []struct {
			Reason, Type, Note string
			Regarding          struct{ Kind, Name, UID string }
		} `json:"items"`
	}
	answer := a.do(http.MethodGet, "/apis/events.k8s.io/v1/namespaces/"+namespace+"/events", nil)
	if err := json.Unmarshal(answer, &list); err != nil {
		a.t.Fatal(err)
	}
	all := make(map[string][]string)
	for _, e := range list.Items {
		if e.Regarding.Kind == "Service" {
			k := e.Regarding.Name + " " + e.Regarding.UID
			all[k] = append(all[k], fmt.Sprintf("%s %s: %s", e.Type, e.Reason, e.Note))
		}
	}
	return all
}

// TestAPIServiceBeyondItsShareGetsAnEvent: one in its namespace when it begins to exceed the share, and one when it is
// within its share again. The controller has the rights of deploy/kubernetes/base only. The Services of others get no
// Event.
func TestAPIServiceBeyondItsShareGetsAnEvent(t *testing.T) {
	a := newStatusAPI(t)
	// Without a Node, the size of the cluster is unknown, and nodes report as rarely as in a large cluster.
	a.do(http.MethodPost, "/api/v1/nodes", object{"metadata": object{"name": "node"}})
	n := newTenantNode(t, a.apiServer, map[string]string{"SLUICE_LOADBALANCER_LIMITS_FRONTENDS": "40"})
	a.writer("--identity=" + filepath.Join(n.run, "identity", "identity.sock"))
	n.namespace("evil", nil)
	n.namespace("other", nil)
	service, _ := tenantService("other", "web", "", 2)
	delete(service["spec"].(object), "clusterIP") //nolint:forcetypeassert // of tenantService
	n.a.do(http.MethodPost, "/api/v1/namespaces/other/services", service)
	const services = 6
	uids := make(map[string]string)
	for i := range services {
		name := fmt.Sprint("wide-", i)
		service, _ := tenantService("evil", name, "", 10)
		delete(service["spec"].(object), "clusterIP") //nolint:forcetypeassert // of tenantService
		var made struct {
			Metadata struct{ UID string } `json:"metadata"`
		}
		answer := n.a.do(http.MethodPost, "/api/v1/namespaces/evil/services", service)
		if err := json.Unmarshal(answer, &made); err != nil {
			t.Fatal(err)
		}
		uids[name] = name + " " + made.Metadata.UID
	}
	newest := uids[fmt.Sprint("wide-", services-1)]
	eventually(t, "an Event about a Service beyond the share", func() error {
		all := a.serviceEvents("evil")
		const text = "Warning ExceedsShare: beyond the share of its tenant on 1 of 1 nodes (%s): "
		if len(all[newest]) != 1 || !strings.HasPrefix(all[newest][0], fmt.Sprintf(text, n.nodeName())) ||
			!strings.Contains(all[newest][0], "(limits.frontends)") {
			return fmt.Errorf("%q has %q", newest, all)
		}
		return nil
	})
	for i := range services - 1 {
		n.a.do(http.MethodDelete, fmt.Sprint("/api/v1/namespaces/evil/services/wide-", i), nil)
	}
	eventually(t, "an Event about a Service within the share", func() error {
		all := a.serviceEvents("evil")
		if len(all[newest]) != 2 || !strings.Contains(strings.Join(all[newest], "\n"), "Normal WithinShare: ") {
			return fmt.Errorf("%q has %q", newest, all)
		}
		return nil
	})
	if all := a.serviceEvents("evil"); len(all[uids["wide-0"]]) != 0 {
		t.Errorf("the oldest Service, which is within the share, has %q", all[uids["wide-0"]])
	}
	if all := a.serviceEvents("other"); len(all) != 0 {
		t.Errorf("another tenant has %q", all)
	}
}

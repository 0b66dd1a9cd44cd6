// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package session

import (
	"context"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/services/identity/internal/test/etcdtest"
)

func TestVersionsInWhichRolesHold(t *testing.T) {
	for text, want := range map[string]bool{
		"3.4.23": false, "3.4.99": false, "3.5.32": false, "3.5.33": true, "3.6.0": false, "3.6.13": false, "3.6.14": true,
		"3.6.14-rc.0": false, "3.6.16": true, "3.7.0": false, "3.7.0-rc.0": false, "3.7.1": true, "3.8.0-alpha.0": true,
		"4.0.0": true, "2.9.99": false,
	} {
		v, err := parseVersion(text)
		if err != nil {
			t.Fatal(err)
		}
		if v.holds() != want {
			t.Errorf("%s: %v, want %v", text, v.holds(), want)
		}
	}
	for _, text := range []string{"", "3", "3.6", "three"} {
		if v, err := parseVersion(text); err == nil {
			t.Errorf("%q: %v", text, v)
		}
	}
}

// statusOf answers for members as if they had another version.
type statusOf struct {
	clientv3.Maintenance
	version string
}

func (m *statusOf) Status(ctx context.Context, endpoint string) (*clientv3.StatusResponse, error) {
	resp, err := m.Maintenance.Status(ctx, endpoint)
	if err == nil && m.version != "" {
		resp.Version = m.version
	}
	return resp, err
}

// TestOldEtcdThatHasRolesIsNamed uses an etcd with authentication, and replaces the version in its answers.
func TestOldEtcdThatHasRolesIsNamed(t *testing.T) {
	server := etcdtest.StartTLS(t)
	cert, key := server.Files("node")
	s := openAs(t, Client{Endpoints: []string{server.Endpoint}, CA: server.CA, Cert: cert, Key: key}, "node")
	answers := &statusOf{Maintenance: s.client.Maintenance, version: "3.6.8"}
	s.client.Maintenance = answers

	var roles Roles
	s.checkRoles(t.Context(), &roles)
	if err := roles.Err(); err != nil {
		t.Errorf("nodes without roles: %v", err)
	}
	admin := server.As("root")
	for _, call := range []func() error{
		func() error { _, err := admin.RoleAdd(t.Context(), "root"); return err },
		func() error { _, err := admin.RoleAdd(t.Context(), "sluice"); return err },
		func() error { return addUser(t, admin, "root", "root") },
		func() error { return addUser(t, admin, "node", "sluice") },
		func() error { _, err := admin.AuthEnable(t.Context()); return err },
	} {
		if err := call(); err != nil {
			t.Fatal(err)
		}
	}
	s.checkRoles(t.Context(), &roles)
	err := roles.Err()
	if err == nil || !strings.Contains(err.Error(), server.Endpoint+" (3.6.8); update to 3.5.33, 3.6.14, 3.7.1") {
		t.Errorf("an old etcd: %v", err)
	}
	answers.version = ""
	s.checkRoles(t.Context(), &roles)
	if err := roles.Err(); err != nil {
		t.Errorf("the etcd of this test: %v", err)
	}
}

// addUser adds a user without a password that has a role.
func addUser(t *testing.T, admin *clientv3.Client, name, role string) error {
	t.Helper()
	if _, err := admin.UserAddWithOptions(t.Context(), name, "", &clientv3.UserAddOptions{NoPassword: true}); err != nil {
		return err
	}
	_, err := admin.UserGrantRole(t.Context(), name, role)
	return err
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"os"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/process"
)

func TestSettingsAreThoseOfTheDocumentation(t *testing.T) {
	want, err := process.Reference("identity", func(p instance.Paths) Config {
		c := defaults(p)
		c.Node = "the host's name"
		return c
	})
	if err != nil {
		t.Fatal(err)
	}
	doc, err := os.ReadFile("../../docs/reference/identity.md")
	if err != nil {
		t.Fatal(err)
	}
	// Settings that all services share are documented once, elsewhere.
	_, own, ok := strings.Cut(want, "\n| `node`")
	if own = "| `node`" + strings.TrimSpace(own); !ok || !strings.Contains(string(doc), own) {
		t.Errorf("docs/reference/identity.md does not have these rows:\n%s", own)
	}
}

func TestTokenForTheStoreNeedsKubernetesAndADirectory(t *testing.T) {
	paths, err := instance.New("")
	if err != nil {
		t.Fatal(err)
	}
	valid := func() Config {
		c := defaults(paths)
		c.Node, c.Kubernetes.API = "n1", []string{"https://192.0.2.1:6443"}
		c.Etcd.StoreDir, c.Etcd.StoreToken = "/var/lib/sluice/identity", "/run/token"
		return c
	}
	if c := valid(); c.Validate() != nil {
		t.Error(c.Validate())
	}
	for want, change := range map[string]func(*Config){
		"etcd.storeToken: needs":   func(c *Config) { c.Kubernetes.API = nil },
		"etcd.storeToken: needs ":  func(c *Config) { c.Etcd.StoreDir = "" },
		"etcd.storeToken: \"token": func(c *Config) { c.Etcd.StoreToken = "token" },
		"etcd.storeNamespace: is":  func(c *Config) { c.Etcd.Namespace = "" },
	} {
		c := valid()
		change(&c)
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want an error with %q", err, want)
		}
	}
}

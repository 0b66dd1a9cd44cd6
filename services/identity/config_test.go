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

// TestEndpointsReplaceTheStoreInKubernetes: the manifests always name the directory and the token. A cluster with
// another etcd, which may need certificates, keeps it.
func TestEndpointsReplaceTheStoreInKubernetes(t *testing.T) {
	paths, err := instance.New("")
	if err != nil {
		t.Fatal(err)
	}
	without := defaults(paths)
	without.Node, without.Etcd.Endpoints = "n1", []string{"http://192.0.2.1:2379"}
	without.Etcd.StoreDir, without.Etcd.StoreToken = "/var/lib/sluice/identity", "/run/token"
	if err := without.Validate(); err != nil {
		t.Errorf("without an API server, which only the store needs: %v", err)
	}
	for name, of := range map[string]struct {
		endpoints []string
		ca, token string
		store     bool
		problem   string
	}{
		"the store":                 {nil, "", "/run/token", true, ""},
		"another etcd":              {[]string{"http://192.0.2.1:2379"}, "", "/run/token", false, ""},
		"another etcd with TLS":     {[]string{"https://192.0.2.1:2379"}, "/run/ca.crt", "/run/token", false, ""},
		"TLS without an etcd":       {nil, "/run/ca.crt", "/run/token", true, "ca, cert, key and serverName are for another"},
		"two schemes":               {[]string{"https://192.0.2.1:1", "unix:///x"}, "", "/run/token", false, "etcd: "},
		"the store on a machine":    {[]string{"http://192.0.2.1:2379"}, "", "", true, ""},
		"no endpoints of a machine": {nil, "", "", true, ""},
	} {
		c := defaults(paths)
		c.Node, c.Kubernetes.API = "n1", []string{"https://192.0.2.1:6443"}
		c.Etcd.StoreDir, c.Etcd.StoreToken = "/var/lib/sluice/identity", of.token
		c.Etcd.Endpoints, c.Etcd.CA = of.endpoints, of.ca
		err := c.Validate()
		if (err != nil) != (of.problem != "") || err != nil && !strings.Contains(err.Error(), of.problem) {
			t.Errorf("%s: %v, want %q", name, err, of.problem)
		}
		if c.Etcd.store() != of.store {
			t.Errorf("%s: the node uses the store: %t", name, c.Etcd.store())
		}
	}
	if got := defaults(paths).Etcd.client().Endpoints; len(got) != 1 || got[0] != "http://127.0.0.1:2379" {
		t.Errorf("without settings, etcd is at %v", got)
	}
}

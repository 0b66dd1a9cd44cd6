// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package dev

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
)

func TestConnectExecutesThePluginAsARuntimeDoes(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o700); err != nil { //nolint:gosec // executable
			t.Fatal(err)
		}
		return path
	}
	plugin := write("sluice-cni", "#!/bin/sh\ncat > "+dir+"/stdin\n"+
		"echo \"$CNI_COMMAND $CNI_CONTAINERID $CNI_IFNAME $CNI_NETNS $CNI_ARGS\" > "+dir+"/env\n"+
		"echo '{\"ips\": [{\"address\": \"10.244.0.2/32\"}, {\"address\": \"fd00:244::2/128\"}]}'\n")
	config := write("sluice.json", `{"name":"sluice","type":"sluice-cni"}`)
	p, err := podOf(dir, "shop/web", []string{"app=web"})
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := p.connect(t.Context(), &invocation.Invocation{Out: &out, Format: "table"}, plugin, config); err != nil {
		t.Fatal(err)
	}
	const want = " is connected as the pod shop/web with 10.244.0.2 and fd00:244::2.\n"
	if !strings.HasSuffix(out.String(), want) {
		t.Errorf("%q, want %q", out.String(), want)
	}
	for name, want := range map[string]string{
		"stdin": `"args":{"cni":{"labels":[{"key":"app","value":"web"}]}}`,
		"env":   "ADD shop-web eth0 " + dir + " K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web\n",
	} {
		if text, err := os.ReadFile(filepath.Join(dir, name)); err != nil || !strings.Contains(string(text), want) {
			t.Errorf("%s: %q, %v, want %q", name, text, err, want)
		}
	}
	failing := write("failing", "#!/bin/sh\necho '{\"code\": 11, \"msg\": \"try again\", \"details\": \"why\"}'\nexit 1\n")
	if _, err := p.call(t.Context(), "ADD", failing, config); err == nil || err.Error() != "CNI ADD: try again: why" {
		t.Errorf("a plugin that fails: %v", err)
	}
}

func TestArgumentsOfConnectAreChecked(t *testing.T) {
	p, err := podOf("web", "web", nil)
	if err != nil || p.Netns != "/run/netns/web" || p.Namespace != "default" || p.Container != "web" {
		t.Errorf("%+v, %v", p, err)
	}
	for _, bad := range [][]string{
		{"web", ""},
		{"web", "a/b/c"},
		{"web", "/b"},
		{"web", "a;b"},
		{"web", "a", "app"},
		{"web", "a", "app=we b"},
		{"web", "a", "app=-"},
	} {
		if _, err := podOf(bad[0], bad[1], bad[2:]); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package report

import (
	"bytes"
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"
)

// TestSecretsAreReplacedInEveryForm redacts secrets in annotations, arguments, logs and configurations.
func TestSecretsAreReplacedInEveryForm(t *testing.T) {
	for name, text := range map[string]string{
		"a key of a kubeconfig":         "    client-key-data: " + private + private + "\n",
		"a key of a kubeconfig in JSON": `{"users":[{"user":{"client-key-data":"` + private + private + `"}}]}`,
		"a registry's authorisation":    `{"auths":{"r.example":{"auth":"` + private + private + `"}}}`,
		"a key of a Secret":             `{"data":{"tls.key":"` + private + private + `"}}`,
		"a key of a Secret, YAML":       "data:\n  tls.key: " + private + private + "\n",
		"a preshared key":               `{"psk":"` + private + `"}`,
		"a preshared key of wireguard":  "PresharedKey = " + private + private + "\n",
		"a signature of a URL":          "https://a.example/b?sig=" + private + "&x=y",
		"a secret in a multi-line JSON": "x\n{\n  \"password\":\n    \"" + private + "\"\n} {",
		"a YAML block":                  "password: |\n  " + private + "\nuser: x\n",
		"a YAML block in an annotation": `{"a":"password: >-\n  ` + private + `\nuser: x"}`,
		"an argument behind an equals":  "sluice-identity -etcd.password=" + private + "\n",
		"a passcode":                    `{"passcode":"` + private + `"}`,
		"a PGP key": "-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n" + private +
			"\n-----END PGP PRIVATE KEY BLOCK-----\n",
		"a base64 PEM":                      "key: LS0tLS1CRUdJTiBSU0EgUFJJVkFURSBLRVktLS0tLQo" + private + "\n",
		"a bearer of a short word":          "Authorization: Bearer " + private + "\n",
		"a bearer without the header":       "sent bearer " + private + "x to the API\n",
		"a token of a service, not a JWT":   "glpat-" + private + private + "\n",
		"a map that Go prints with quotes":  `map[string]string{"password":"` + private + `"}`,
		"a password with blanks":            "password=my " + private + " has blanks\n",
		"a password with blanks at the end": "retry: password: my very " + private,
		"a password that ends a map":        "map[password:my " + private + " user:x]",
		"base64 of PEM, in lines": "LS0tLS1CRUdJTiBSU0EgUFJJVkFURSBLRVktLS0tLQpNSUlFcEFJQkFBS0NBUUVBMW\nabc" +
			strings.Repeat("Q", 57) + "\n" + private + "\n",
		"base64 of PEM behind a blank":    "x IC0tLS0tQkVHSU4gUFJJVkFURSBLRVk" + private + "\n",
		"base64 of PEM behind two blanks": "x ICAtLS0tLUJFR0lOIFBSSVZBVEUgS0VZ" + private + "\n",
		"base64 of PEM, escaped ends": `{"x":"LS0tLS1CRUdJTiBSU0EgUFJJVkFURSBLRVktLS0tLQpNSUlFcEFJQk\\n` + private +
			`"} {`,
		"a URL with an at in the password": "https://root:a@" + private + "@host/path",
		"the object of a Secret": `{"kind":"Secret","data":{"anything":"` + private + `"},"stringData":{"x":"` +
			private + `"}}`,
		"a Secret that was applied":       `{"a":"{\"kind\":\"Secret\",\"data\":{\"password\":\"` + private + `\"}}"}`,
		"a setting with its source":       `{"settings":{"etcd.password":{"value":"` + private + `","source":"file"}}}`,
		"a Docker configuration":          `{"data":{".dockerconfigjson":"` + private + `"}}`,
		"a Docker configuration in a log": `x {"auths":{"r.example":{"auth":"` + private + private + `"}}} {`,
		"a Docker identity token":         `{"identitytoken":"` + private + `"}`,
		"a YAML block, deeper":            "a:\n  - password: >-\n      my\n\n      " + private + "\n    user: x\n",
		"a YAML block of a key":           "data:\n  tls.key: |\n    " + private + "\n  tls.crt: x\n",
		"a YAML block in JSON in a log":   `x {"a":"password: |\n  ` + private + `\nuser: x"} {`,
		"YAML on the next line":           "password:\n  " + private + "\nuser: x\n",
		"YAML that goes on":               "password: my\n  " + private + "\nuser: x\n",
		"YAML in a list":                  "password:\n- " + private + "\nuser: x\n",
		"JSON that is broken, two lines":  "{\n  \"password\":\n    \"" + private + "\"\n",
		"an SSH2 key": "---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----\n" + private +
			"\n---- END SSH2 ENCRYPTED PRIVATE KEY ----\n",
		"an age key": "AGE-SECRET-KEY-1" + strings.ToUpper(strings.Repeat("q", 30)) + "\nsecret: " +
			private,
		"a GitHub token":              "clone with ghp_" + private + private + " now\n",
		"a fine-grained GitHub token": "github_pat_" + private + private + "\n",
		"an npm token":                "npm_" + private + private + "\n",
		"a Slack token":               "xoxb-1234-" + private + private + "\n",
		"a Vault token":               "hvs." + private + private + "\n",
		"a signature of a cloud":      "https://a.example/b?X-Amz-Signature=" + private + "&x=y",
		"a user of a command":         "curl -u root:" + private + " https://a.example\n",
		"a WireGuard configuration":   "[Peer]\nPresharedKey = " + private + "=\n",
		"a pre-shared key of IPsec":   `%any : PSK "` + private + `"`,
	} {
		got := string(Output([]byte(text)))
		if strings.Contains(got, private) {
			t.Errorf("%s: %q\nbecomes %q", name, text, got)
		}
	}
}

// TestWhatSurroundsSecretsStays: names, paths, errors about files and the text after a secret stay readable.
func TestWhatSurroundsSecretsStays(t *testing.T) {
	for text, want := range map[string]string{
		"password: my secret\nuser: root\n": "password: REDACTED\nuser: " +
			"root\n",
		"password: |\n  a\n  b\nuser: root\n": "password: |\n  " +
			"REDACTED\nuser: root\n",
		"token:\n  path: /x\n": "token:\n  path: /x\n",
		"time=1 token=abc msg=done\n": "time=1 token=REDACTED " +
			"msg=done\n",
		"etcdctl --password abc get x": "etcdctl --password REDACTED " +
			"get x",
		"etcdctl --password=abc get x": "etcdctl --password=REDACTED " +
			"get x",
		"open /run/token: permission denied": "open /run/token: REDACTED " +
			"denied",
		"open /etc/tls.key: permission denied": "open /etc/tls.key: " +
			"permission denied",
		"etcd.key: /etc/sluice/etcd.key\nx: y\n": "etcd.key: " +
			"/etc/sluice/etcd.key\nx: y\n",
		`{"etcd.key":{"value":"/etc/k.key","source":"file"}}` +
			"\n": `{"etcd.key":{"source":"file","value":"/etc/k.key"}}` + "\n",
		`{"etcd.key":"/etc/k.key","tls.key":"MIIE"}` + "\n": `{"etcd.key":"/etc/k.key",` +
			`"tls.key":"REDACTED"}` + "\n",
		"key: LS0tLS1CRUdJTiBSU0EgUFJJVkFURSBLRVktLS0tLQpNSUlFcEFJQkFBS0NBUUVBMW\nuser: x\n": "key: REDACTED\nuser: x\n",
		`{"args":["--etcd-password","abc","--x","y"]}` + "\n": `{"args":["--etcd-password",` +
			`"REDACTED","--x","y"]}` + "\n",
		"https://root:a@b@host/path x@y": "https://REDACTED@host/path " +
			"x@y",
	} {
		if got := string(Output([]byte(text))); got != want {
			t.Errorf("%q\nbecomes %q\nwant    %q", text, got, want)
		}
	}
}

// FuzzOutput checks that a secret on its own line is redacted, with any text before and after it.
func FuzzOutput(f *testing.F) {
	for _, s := range []string{
		`{"a":1}`, "[1,2\n[3]\n", "password: x\n", "password: |\n  x\n", "token:\n",
		"LS0tLS1CRUdJTi", "tls.key: |\n", "x token='", "{\n \"token\":\"a\"}", "-----BEGIN PRIVATE KEY-----\n",
		`{"a":"{\"b\":1}"}`,
	} {
		f.Add(s, s)
	}
	f.Fuzz(func(t *testing.T, before, after string) {
		if len(before)+len(after) > 10_000 {
			return
		}
		text := before + "\n" + `{"password":"` + private + private + `"}` + "\n" + after
		got := Output([]byte(text))
		if bytes.Contains(got, []byte(private+private)) && !strings.Contains(before+after, private) {
			t.Fatalf("%q\nbecomes %q", text, got)
		}
	})
}

// TestEncodedKeysAreFoundWhereverTheyBegin compares the string search with an equivalent regular expression.
func TestEncodedKeysAreFoundWhereverTheyBegin(t *testing.T) {
	t.Parallel()
	expression := regexp.MustCompile(strings.Join(armors[:], "|"))
	slow := func(text string) string {
		var b strings.Builder
		written := 0
		for m := expression.FindStringIndex(text); m != nil; m = expression.FindStringIndex(text[written:]) {
			start := written + m[0]
			for start > written && isBase64(text[start-1]) {
				start--
			}
			b.WriteString(text[written:start] + redacted)
			written = encodedEnd(text, start)
		}
		return b.String() + text[written:]
	}
	parts := append([]string{
		" ", "\n", `\n`, "x", "user: ", "-", strings.Repeat("Q", 39), strings.Repeat("Q", 40), "LS0t",
	}, armors[:]...)
	random := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		var text string
		for range random.IntN(12) {
			text += parts[random.IntN(len(parts))]
		}
		if got, want := encodedKeys(text), slow(text); got != want {
			t.Fatalf("%q\nbecomes %q\nwant    %q", text, got, want)
		}
	}
}

// TestEveryPatternCompiles: the regular expressions are compiled only at their first use.
func TestEveryPatternCompiles(t *testing.T) {
	t.Parallel()
	for _, p := range patterns {
		if p.find().MatchString("") {
			t.Errorf("%v matches nothing at all", p.words)
		}
	}
	for _, find := range []func() *regexp.Regexp{
		sensitive, sensitiveFlag, sensitiveFile, privateKey, assignment, nextWord, nextName, yamlName, yamlFile,
	} {
		find()
	}
}
